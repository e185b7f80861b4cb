"""Load a model: whole, split across GPUs, or streamed one sublayer at a time."""
