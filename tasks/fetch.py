"""The task that fetches a source from the Hub; it runs only if the source is not a folder."""

from pathlib import Path

from prefect import task

from exl2flow.core.store.source import HubModel
from exl2flow.tasks.client import Hub
from exl2flow.tasks.credentials import read_token
from exl2flow.tasks.hub import fetch, local_or_fetched
from exl2flow.tasks.retries import RETRIED


@task(name="fetch", task_run_name="fetch {source}", persist_result=False, **RETRIED)
def fetch_source(
    source: Path, wanted: HubModel, *, work_root: Path, token_block: str | None
) -> Path:
    """Download a Hub model below the work root and return its folder."""
    return fetch(wanted, work_root, Hub.open(read_token(token_block)))


def fetched_in_flow(source: Path, work_root: Path, token_block: str | None) -> Path:
    """Return the folder of a source, fetching it in its own task if necessary.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the source is a mistyped path.
    """

    def fetching(wanted: HubModel) -> Path:
        return fetch_source(source, wanted, work_root=work_root, token_block=token_block)

    return local_or_fetched(source, work_root, fetching)
