"""Arguments and switches that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RUNNING = "Running"  # the panel of the table's options for where and how a command runs

Source = Annotated[
    Path,
    typer.Argument(
        help="Folder of a Hugging Face model: config.json, tokenizer.json or tokenizer.model, "
        "*.safetensors in fp16, bf16, fp32 or fp8. Or org/name or org/name@revision: a model on "
        "the Hugging Face Hub, which is fetched.",
        metavar="SOURCE",
        show_default=False,
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        metavar="",
        help="Delete the checkpoints of this run, shared ones as well, and start over.",
        rich_help_panel=RUNNING,
    ),
]
NoPrefect = Annotated[
    bool,
    typer.Option(
        "--no-prefect",
        metavar="",
        help="Run the stages directly, not as a Prefect flow. By default the flow runs on the "
        "server of PREFECT_API_URL, or on a temporary one.",
        rich_help_panel=RUNNING,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        metavar="",
        help="Check everything, print the plan or all problems, and stop.",
        rich_help_panel=RUNNING,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar="",
        help="Print one JSON object on stdout instead of tables.",
        rich_help_panel=RUNNING,
    ),
]
