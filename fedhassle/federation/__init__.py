"""A real federation: what its members agree on, their keys, and rounds over a network, by Flower."""
