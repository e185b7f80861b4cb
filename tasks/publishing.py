"""Prefect tasks that publish, alone or at the end of other flows, and their page."""

from contextlib import closing

from prefect import task

from exl2flow.core.options.publication import PublishConfig
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact
from exl2flow.tasks.client import Hub
from exl2flow.tasks.credentials import read_token
from exl2flow.tasks.publish import Published, publish
from exl2flow.tasks.retries import RETRIED


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


SHORT = 8  # digits of a commit on a page


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
