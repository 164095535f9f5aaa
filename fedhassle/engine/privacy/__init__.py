"""Differential privacy by site or by sample, and an account of what it spends."""
