"""A real federation on Flower: agreement, keys and admission, the server, the sites."""
