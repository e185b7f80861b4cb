"""Everything below the arithmetic: errors, configuration, the on-disk store, progress."""
