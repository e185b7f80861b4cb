"""Stages as Prefect tasks: caching, retries and artifacts around calls into quant and inference."""
