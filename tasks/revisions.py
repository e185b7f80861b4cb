"""The newest revisions on the Hub, and the event that announces one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from huggingface_hub.hf_api import ModelInfo
from prefect import task
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, Resource

from exl2flow.tasks.client import Hub
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


@task(
    name="look up revisions",
    **RETRIED,
    persist_result=False,
)
def newest_revisions(repositories: Sequence[str], authors: Sequence[str]) -> list[Revision]:
    """Return the newest commit on `main` of each repository and of all the authors' repositories.

    Raises:
        HubError: a repository does not exist or may not be read.
        HubUnavailable: the Hub does not answer or is overloaded.
    """
    found: dict[str, Revision] = {}
    for repo_id, sha in _newest(repositories, authors):
        found.setdefault(repo_id, Revision(repo_id=repo_id, revision=sha))
    return list(found.values())


def _newest(repositories: Iterable[str], authors: Iterable[str]) -> Iterator[tuple[str, str]]:
    hub = Hub.open()
    for repo_id in repositories:
        info = hub.call(repo_id, partial(hub.api.model_info, repo_id))
        if info.sha:
            yield repo_id, info.sha
    for author in authors:
        models = hub.call(author, partial(_models_of, hub, author))
        yield from ((model.id, model.sha) for model in models if model.sha)


def _models_of(hub: Hub, author: str) -> list[ModelInfo]:
    return list(hub.api.list_models(author=author, expand=["sha"]))


def announce(revisions: Sequence[Revision]) -> None:
    """Send events for new revisions to the Prefect server, and wait until it has received them.

    Raises:
        httpx.HTTPStatusError: the server refused them.
    """
    events = [revision.event().model_dump(mode="json") for revision in revisions]
    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=events).raise_for_status()
