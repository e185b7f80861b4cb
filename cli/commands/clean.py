"""`exl2flow clean`: what a work root holds that no finished conversion needs."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import AsJson
from exl2flow.cli.output.console import emit_json, say, show
from exl2flow.cli.output.tables import table_of
from exl2flow.core.words import size

EXAMPLES = (
    "exl2flow clean   (shows what could go from ./.exl2flow)",
    "exl2flow clean /models/.exl2flow --yes",
    "exl2flow clean /models/.exl2flow --partial   (also conversions that were never finished)",
)


def clean_command(
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="WORK_ROOT...",
            help="Folders of checkpoints.",
            show_default="`.exl2flow` in this folder",
        ),
    ] = None,
    *,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove it; without this it is only shown.")
    ] = False,
    keep_latest: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Finished conversions to keep for each output folder, newest first.",
        ),
    ] = 1,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Also what a conversion would resume from that was begun and not finished, and "
            "fetched models that were never converted.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show or remove checkpoints that no finished conversion needs.

    They are: stages whose output was made anew since then, quantized tensors that are in a complete
    output, fetched models of such stages, and damaged folders that were set aside. Without the
    quantized tensors, another `--shard-size-mb` or a lost output means quantizing again.
    """
    from exl2flow.core.store.cleaning import clean, unneeded  # these import torch
    from exl2flow.pipeline.stages import ALL_STAGES

    work = clean if yes else unneeded
    folders = roots or [Path(".exl2flow")]
    removable = [
        i for f in folders for i in work(f, ALL_STAGES, keep_latest=keep_latest, partial=partial)
    ]
    total = sum(item.size for item in removable)
    if as_json:
        items = [{"path": str(i.path), "why": i.why, "bytes": i.size} for i in removable]
        emit_json({"items": items, "bytes": total, "removed": yes})
        return
    if removable:
        rows = [{"what": str(i.path), "why": i.why, "size": size(i.size)} for i in removable]
        show(table_of(rows))
    verb = "removed" if yes else "can go"
    say(f"{size(total)} {verb}{'' if yes or not removable else '; `--yes` removes it'}")
