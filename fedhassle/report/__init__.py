"""Tables and pictures of splits and results."""
