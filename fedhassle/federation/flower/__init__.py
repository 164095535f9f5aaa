"""Contact with Flower: transport, processes, patches, logs."""
