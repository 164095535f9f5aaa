"""Reports: the ledger beside the paper, as a page to look at, Markdown, LaTeX and CSV."""
