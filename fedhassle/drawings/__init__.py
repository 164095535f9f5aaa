"""Pictures of splits, runs and predictions."""
