"""The coordinator's side: the server process and the rounds over the network."""
