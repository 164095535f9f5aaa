"""The paper's tables and figures: experiments as data, a ledger of finished runs, and the report."""
