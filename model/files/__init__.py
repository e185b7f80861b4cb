"""Model files: safetensors, and weights as fp8, mxfp4, GPTQ and EXL2."""
