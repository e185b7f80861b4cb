"""The command line; `main.py` is the program, and what needs Prefect plugs in from `flows`."""
