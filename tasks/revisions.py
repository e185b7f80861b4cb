"""The newest revisions on the Hub, and the event that announces one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from huggingface_hub.hf_api import ModelInfo
from prefect import task
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, Resource

from exl2flow.pipeline.hub.client import Hub
from exl2flow.tasks.retries import RETRIED

EVENT = "exl2flow.revision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A commit of a model repository: `org/name` and the commit's sha."""

    repo_id: str
    revision: str

    def event(self) -> Event:
        """Return the event that announces this revision, with resource `hf.model.org--name`."""
        resource = {
            "prefect.resource.id": f"hf.model.{self.repo_id.replace('/', '--')}",
            "prefect.resource.name": self.repo_id,
        }
        payload = {"repo_id": self.repo_id, "revision": self.revision}
        return Event(event=EVENT, resource=Resource(resource), payload=payload)


@task(name="look up revisions", persist_result=False, **RETRIED)
def newest_revisions(repositories: Sequence[str], authors: Sequence[str]) -> list[Revision]:
    """Return the newest commit on `main` of each repository and of all the authors' repositories.

    Raises:
        HubError: a repository does not exist or may not be read.
        HubUnavailable: the Hub does not answer or is overloaded.
    """
    hub, commits = Hub.open(), dict[str, str | None]()
    for repo_id in repositories:
        commits[repo_id] = hub.call(repo_id, partial(hub.api.model_info, repo_id)).sha

    def models_of(author: str) -> list[ModelInfo]:
        return list(hub.api.list_models(author=author, expand=["sha"]))

    for author in authors:
        for model in hub.call(author, partial(models_of, author)):
            commits.setdefault(model.id, model.sha)
    return [Revision(repo_id=repo, revision=sha) for repo, sha in commits.items() if sha]


def announce(revisions: Sequence[Revision]) -> None:
    """Send events for new revisions to the Prefect server, and wait until it has received them.

    Raises:
        httpx.HTTPStatusError: the server refused them.
    """
    events = [revision.event().model_dump(mode="json") for revision in revisions]
    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=events).raise_for_status()
