"""`exl2flow report`: converted models as one page for a browser."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.output.console import tell
from exl2flow.core.options.sweep import REPORT_PAGE

EXAMPLES = (
    "exl2flow report ./Llama-3.2-1B-exl2",
    "exl2flow report ./.exl2flow/llama-3.2-1b-1f0c6e2d9a4b --out report.html",
)


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder of a sweep, folder that holds converted models, or work directory of a "
            "model.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page.", show_default="`report.html` in DIR"),
    ] = None,
) -> None:
    """Write one self-contained HTML page that compares converted models.

    It shows figures and plots of all bitrates, where bits and errors are, samples, and how the
    models were made, with a section for each source and each text that models were scored on. It
    needs no network and no script.
    """
    from exl2flow.core.store.files import write_text  # these import torch
    from exl2flow.inference.report.page import write_up

    page = out or folder / REPORT_PAGE
    write_text(page, write_up(folder))
    tell(f"report  {page.resolve()}")
