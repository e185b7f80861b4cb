"""Sources on the command line: folders, or Hub models, fetched first; imports take seconds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from exl2flow.cli.output.console import say
from exl2flow.cli.output.progress import shown
from exl2flow.core.store.source import HubModel
from exl2flow.pipeline.hub.fetch import fetch, local_or_fetched
from exl2flow.pipeline.hub.outline import outlined
from exl2flow.pipeline.release import hub_of
from exl2flow.pipeline.run import Sources


def sources(*, plain: bool, renew: bool) -> Sources:
    """Return the command line's ways to sources; they say the same line once."""
    said = set[str]()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    def outlined_here(
        source: Path, work_root: Path, token_block: str | None
    ) -> AbstractContextManager[Path | None]:
        return outlined(source, work_root, lambda: hub_of(token_block), renew=renew, say=say_once)

    fetched = partial(fetched_with_progress, plain=plain, renew=renew, tell=say_once)
    return Sources(outlined=outlined_here, fetched=fetched)


def fetched_with_progress(
    source: Path,
    work_root: Path,
    token_block: str | None,
    *,
    plain: bool,
    renew: bool = False,
    tell: Callable[[str], None] = say,
) -> Path:
    """Return the folder of a source, and say which one is used where that may surprise.

    Args:
        renew: whether to use the newest commit on the Hub, not the one that the work root keeps.
        tell: receives lines for the user.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the source is a mistyped path.
    """

    def fetching(wanted: HubModel) -> Path:
        with shown(plain=plain):
            return fetch(wanted, work_root, hub_of(token_block), renew=renew)

    return local_or_fetched(source, work_root, fetching, say=tell)
