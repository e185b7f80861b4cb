"""Sources on the command line: folders, or Hub models, fetched first; imports take seconds."""

from pathlib import Path

from exl2flow.core.store.source import HubModel
from exl2flow.flows.cli.console import say
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.runs.release import hub_of
from exl2flow.tasks.hub import fetch, local_or_fetched


def fetched_with_progress(
    source: Path, work_root: Path, token_block: str | None, *, plain: bool, renew: bool = False
) -> Path:
    """Return the folder of a source, and say which one is used where that may surprise.

    Args:
        renew: whether to use the newest commit on the Hub, not the one that the work root keeps.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the source is a mistyped path.
    """

    def fetching(wanted: HubModel) -> Path:
        with shown(plain=plain):
            return fetch(wanted, work_root, hub_of(token_block), renew=renew)

    return local_or_fetched(source, work_root, fetching, say=say)
