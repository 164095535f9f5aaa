"""The paper's tables and figures: experiments as data, a ledger of finished runs, the work that fills it."""
