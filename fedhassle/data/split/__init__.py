"""Splits: who holds which samples, and which of them are labelled."""
