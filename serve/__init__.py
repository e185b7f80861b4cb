"""An HTTP server for one model; only `cli/commands/serve.py` imports it."""
