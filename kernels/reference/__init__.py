"""The torch implementation of `Ops`, the reference for every CUDA kernel."""
