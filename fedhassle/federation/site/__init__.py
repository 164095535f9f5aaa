"""A site's side: the node process and the worker that trains."""
