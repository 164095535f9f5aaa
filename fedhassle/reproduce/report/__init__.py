"""The ledger beside the paper: an HTML page, Markdown, LaTeX and CSV."""
