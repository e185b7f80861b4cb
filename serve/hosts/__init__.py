"""Models that are loaded: their running texts, turns, keys, figures."""
