"""From a request (preset, TOML file, KEY=VALUE) to checked settings to the objects that train."""
