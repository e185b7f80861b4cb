"""What both implementations share: `Ops`, formats of codes and caches, attention rules."""
