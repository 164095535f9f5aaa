"""The ledger beside the paper: a page to look at, Markdown, LaTeX and CSV."""
