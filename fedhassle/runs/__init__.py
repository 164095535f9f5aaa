"""A run from start to summary: its folder, records and trackers; several runs at once and compared."""
