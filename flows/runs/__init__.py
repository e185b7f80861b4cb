"""A run with or without Prefect: checks, its pipeline, a sweep's bitrates, publishing."""
