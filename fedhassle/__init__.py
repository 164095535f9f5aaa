"""Federated semi-supervised learning where each site labels any share of its data."""
