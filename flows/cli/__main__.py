"""`python -m exl2flow.flows.cli`: the command line where no script is installed."""

from exl2flow.flows.cli import main

main()
