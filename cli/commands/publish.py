"""`exl2flow publish`: converted models on the Hugging Face Hub, verified, with a card."""

from dataclasses import asdict
from typing import Annotated

import typer

from exl2flow.cli.options import with_options
from exl2flow.cli.output.console import emit_json
from exl2flow.cli.output.progress import shown
from exl2flow.core.options.publication import PublishConfig

EXAMPLES = (
    "exl2flow publish ./3bpw ./4bpw ./5bpw --repo org/Llama-3.2-1B-exl2",
    "exl2flow publish ./4bpw --repo org/mine-exl2 --dry-run > card.md   (without a network)",
    "exl2flow publish ./4bpw --repo org/mine-exl2 --base-model org/mine --license apache-2.0",
    "The token is that of HF_TOKEN, of `hf auth login`, or of a Prefect Secret block. Repeat an "
    "interrupted command to continue where it stopped.",
)


@with_options(panel="Options", hides=False)
def publish(
    *,
    config: PublishConfig,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check all that needs no network, print the card on stdout, and stop."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: address, commits, files sent.")
    ] = False,
) -> None:
    """Publish converted models: a repository, a branch per bitrate, a card on every branch.

    Upload privately, download again, compare digests, run the models; only then make them public.
    Refuse sets whose KL divergence does not fall as bytes rise, models without a score, and sources
    that are gated or whose licence is unknown or forbids it.
    """
    from exl2flow.cli.output.results import print_draft, print_published
    from exl2flow.pipeline.hub.publish import draft
    from exl2flow.pipeline.hub.publish import publish as run
    from exl2flow.pipeline.release import hub_of  # these import torch

    if dry_run:
        card = draft(config)
        emit_json(asdict(card)) if as_json else print_draft(card)
        return
    with shown(plain=as_json) as progress:
        published = run(config, hub_of(config.token_block), progress=progress)
    if as_json:
        emit_json(asdict(published))
    else:
        print_published(published)
