"""An HTTP server for one model; only `flows/cli/serve.py` imports it."""
