"""Runs without Prefect: their kinds, the list of stages, checks, the Hub."""
