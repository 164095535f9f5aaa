"""A site's own images: folders, label files, and checks of both."""
