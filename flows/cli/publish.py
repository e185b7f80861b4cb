"""`exl2flow publish`: converted models on the Hugging Face Hub, verified, with a card."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.flows.cli.console import emit_json
from exl2flow.flows.cli.options import validated
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.tables import print_draft, print_published

EXAMPLES = (
    "Examples:",
    "exl2flow publish ./3bpw ./4bpw ./5bpw --repo org/Llama-3.2-1B-exl2",
    "exl2flow publish ./4bpw --repo org/mine-exl2 --dry-run > card.md   (without a network)",
    "exl2flow publish ./4bpw --repo org/mine-exl2 --base-model org/mine --license apache-2.0",
    "The token is read from HF_TOKEN or from a Prefect Secret block. Repeat an interrupted command "
    "to continue where it stopped.",
)
FLAGS = {"max_kl": "--max-kl", "base_model": "--base-model", "repo": "--repo"}


def publish(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Output folders of `exl2flow convert` for one source, one per bitrate.",
            show_default=False,
        ),
    ],
    *,
    repo: Annotated[
        str,
        typer.Option(
            "--repo",
            metavar="ORG/NAME",
            help="Repository for a branch per bitrate; created if missing.",
            show_default=False,
        ),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Leave it private after verification.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Publish despite quality, gating or licence; the card says so.",
        ),
    ] = False,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl",
            metavar="NATS",
            help="Refuse models whose KL divergence is above this.",
            show_default="1.0",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="ORG/NAME",
            help="The source on the Hub, if it was converted from a folder.",
            show_default="as recorded",
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="ID",
            help="The source's licence, as an id of the Hub, if it is not recorded.",
            show_default="as recorded",
        ),
    ] = None,
    measurement: Annotated[
        Path | None,
        typer.Option(
            "--measurement",
            metavar="FILE",
            help="measurement.json to publish on `main`.",
            show_default="none",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="auto|cpu|cuda", help="Where to try the downloaded models."
        ),
    ] = "auto",
    token_block: Annotated[
        str | None,
        typer.Option(
            "--token-block",
            metavar="NAME",
            help="Prefect Secret block that holds the token for the Hub.",
            show_default="the token in HF_TOKEN",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check all that needs no network, print the card on stdout, and stop.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: address, commits, files sent."),
    ] = False,
) -> None:
    """Publish converted models: a repository, a branch per bitrate, a card on every branch.

    Upload privately, download again, compare digests, run the models; only then make them public.
    Refuse sets whose KL divergence does not fall as bytes rise, models without a score, and sources
    that are gated or whose licence is unknown or forbids it.
    """
    from exl2flow.core.options.publication import PublishConfig

    given = {
        "models": models,
        "repo": repo,
        "private": private,
        "force": force,
        "max_kl": max_kl,
        "base_model": base_model,
        "license": licence,
        "measurement": measurement,
        "device": device,
        "token_block": token_block,
    }
    known = {key: value for key, value in given.items() if value is not None}
    config = validated(PublishConfig, known, FLAGS)
    from exl2flow.flows.runs.release import hub_of  # these import torch
    from exl2flow.tasks.publish import draft
    from exl2flow.tasks.publish import publish as run

    if dry_run:
        found = draft(config).to_json()
        emit_json(found) if as_json else print_draft(found)
        return
    with shown(plain=as_json) as progress:
        published = run(config, hub_of(config.token_block), progress=progress).to_json()
    if as_json:
        emit_json(published)
    else:
        print_published(published)
