"""Secure aggregation: sums of the sites' vectors that reveal no single one. Pure, and without Flower."""
