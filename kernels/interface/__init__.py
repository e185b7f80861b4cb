"""What operations take and return: packed matrices, cache formats, attention rules."""
