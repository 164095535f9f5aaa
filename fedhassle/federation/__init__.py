"""A real federation: what its members agree on, their keys, and what they check before they join."""
