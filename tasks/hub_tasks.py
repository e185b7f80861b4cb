"""Prefect tasks that fetch models from the Hub and publish to it, with the token of a Secret block.

The token is read on use and never passed around.
"""

from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, cast

from prefect import task
from prefect.blocks.system import Secret

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.store.source import HubModel
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.fetch import fetch, local_or_fetched
from exl2flow.pipeline.hub.outline import outlined
from exl2flow.pipeline.hub.publish import Published, publish
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact
from exl2flow.tasks.retries import RETRIED

SHORT = 8  # digits of a commit on a page


def read_token(block: str | None) -> str | None:
    """Return a Secret block's token; None without one, because the client reads HF_TOKEN itself.

    Raises:
        ConfigError: no such block, or it does not hold text.
    """
    if block is None:
        return None
    try:
        token = cast(Secret[Any], Secret.load(block)).get()
    except ValueError:
        raise ConfigError(
            f"no Secret block `{block}` on this Prefect server; create one in its UI "
            "under Blocks, or set HF_TOKEN"
        ) from None
    if not isinstance(token, str) or not token:
        raise ConfigError(f"the Secret block `{block}` holds no text; store the token in it")
    return token


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


def outlined_in_flow(
    source: Path, work_root: Path, token_block: str | None
) -> AbstractContextManager[Path | None]:
    """Provide the outline of a source that is not fetched yet; see `outlined`."""
    return outlined(source, work_root, lambda: Hub.open(read_token(token_block)))


@task(name="publish", task_run_name="publish {config.repo}", persist_result=False, **RETRIED)
def publish_models(config: PublishConfig) -> Published:
    """Publish with the token from the environment or from a Secret block, which is read here.

    Link the branches on the run's page.
    """
    artifacts = Artifacts(config.repo.replace("/", "-"))
    hub = Hub.open(read_token(config.token_block))
    with closing(ProgressArtifact(artifacts, "publish")) as progress:
        published = publish(config, hub, progress=progress)
    artifacts.markdown("published", publication_page(config.repo, published), config.repo)
    return published


def publication_page(repo: str, published: Published) -> str:
    """Return Markdown with links to the published branches."""
    visible = "private" if published.private else "public"
    links = branch_links(published)
    lines = [
        f"[{repo}]({published.url}) is {visible}; this run sent {len(published.sent)} files.",
        "",
        "| branch | commit |",
        "|---|---|",
        *(
            f"| [{branch}]({links[branch]}) "
            f"| [`{commit[:SHORT]}`]({published.url}/commit/{commit}) |"
            for branch, commit in published.branches.items()
        ),
        *(f"\n**Published in spite of:** {note}" for note in published.notes),
    ]
    return "\n".join(lines) + "\n"


def branch_links(published: Published) -> dict[str, str]:
    """Return branch → its page on the Hub."""
    return {branch: f"{published.url}/tree/{branch}" for branch in published.branches}
