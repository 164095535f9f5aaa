"""The same federated rounds by fedhassle, by a plain loop and by other simulators."""
