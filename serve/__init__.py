"""An HTTP server for one model, in OpenAI's form; only `flows/cli/serve.py` imports it."""
