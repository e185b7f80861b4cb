"""Types of arguments and results: packed matrices, cache formats, attention rules."""
