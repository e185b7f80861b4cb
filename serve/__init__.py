"""An HTTP server for one model, in forms of OpenAI and Anthropic; only `flows/cli/serve.py` imports it."""
