"""The CUDA implementation of `Ops`: compiles and launches the kernels of `csrc/`."""
