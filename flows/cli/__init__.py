"""The part of the command line that is about Prefect, and the program by its first name."""


def main() -> None:
    """Run the program `exl2flow` and exit."""
    from exl2flow.cli.main import main as program  # which asks this folder for its commands

    program()
