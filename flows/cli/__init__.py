"""The command line: one file per command; `main` is the program."""

from exl2flow.flows.cli.main import main

__all__ = ["main"]
