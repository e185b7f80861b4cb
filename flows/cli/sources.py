"""Sources on the command line: a folder, or a model on the Hub, which is fetched first."""

from pathlib import Path
from typing import TypeVar

from exl2flow.core.config import RunOptions
from exl2flow.flows.cli.console import say
from exl2flow.flows.cli.progress import shown

Config = TypeVar("Config", bound=RunOptions)


def local_or_fetched(
    source: Path, work_root: Path, token_block: str | None, *, plain: bool
) -> Path:
    """Return the folder of a source, and say which one it is where the name is ambiguous.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the source is a mistyped path.
    """
    from exl2flow.core.source import HubModel, hub_model  # imports torch

    wanted = hub_model(source, work_root)
    if wanted is None:
        named = HubModel.of(source)
        if named is not None and named.is_begun(work_root):
            say(
                f"source  `{source}`: using the local folder of this name, not the model on the Hub"
            )
        return source
    from exl2flow.flows.release import hub_of  # these import torch
    from exl2flow.tasks.hub import fetch

    say(f"source  `{source}`: no such folder, fetching the model from the Hub")
    with shown(plain=plain):
        folder = fetch(wanted, work_root, hub_of(token_block))
    say(f"source  `{source}`: commit {folder.parent.name}, in `{folder}`")
    return folder


def with_local_source(config: Config, *, plain: bool) -> Config:
    """Return the configuration with a folder as its source.

    Raises:
        HubError: the model cannot be fetched.
    """
    root, block = config.work_dir_root, config.token_block
    source = local_or_fetched(config.source, root, block, plain=plain)
    return config if source == config.source else config.model_copy(update={"source": source})
