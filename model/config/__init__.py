"""Configs: families as table rows, and `config.json` resolved to a `ModelSpec`."""
