"""The task that fetches a source from the Hub; flows whose source is a folder do not have it."""

from pathlib import Path
from typing import TypeVar

from prefect import task

from exl2flow.core.config import RunOptions
from exl2flow.core.source import hub_model
from exl2flow.tasks.credentials import read_token
from exl2flow.tasks.hub import Hub, local_source
from exl2flow.tasks.retries import RETRIED

Config = TypeVar("Config", bound=RunOptions)


@task(
    name="fetch",
    task_run_name="fetch {source}",
    persist_result=False,
    **RETRIED,
)
def fetch_source(source: Path, work_root: Path, token_block: str | None) -> Path:
    """Return the folder of a Hub model, downloaded below the work root."""
    return local_source(source, work_root, Hub.open(read_token(token_block)))


def local_or_fetched(source: Path, work_root: Path, token_block: str | None) -> Path:
    """Return the folder of a source; what is a folder already needs no task.

    Raises:
        HubError: the model cannot be had.
        SourceModelError: the source is a mistyped path.
    """
    if hub_model(source, work_root) is None:
        return source
    return fetch_source(source, work_root, token_block)


def with_local_source(config: Config) -> Config:
    """Return a configuration whose source is a folder, if it names a Hub model.

    Raises:
        HubError: the model cannot be had.
    """
    source = local_or_fetched(config.source, config.work_dir_root, config.token_block)
    return config if source == config.source else config.model_copy(update={"source": source})
