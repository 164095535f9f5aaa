"""Splits of a training set among clients, with and without labels."""
