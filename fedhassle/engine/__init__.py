"""Training: rounds, clients, and the devices they run on."""
