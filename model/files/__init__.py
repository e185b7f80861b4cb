"""Model files: safetensors, and weights as fp8, GPTQ and EXL2."""
