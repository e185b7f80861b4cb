"""Tensor parallelism: ranks that share a model, and the shard of each."""
