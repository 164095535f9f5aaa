"""All contact with Flower: transport, processes, patches, logs."""
