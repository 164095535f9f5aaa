"""Setting a federation up: its folder, keys, admission of sites, checks."""
