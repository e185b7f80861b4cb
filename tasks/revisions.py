"""What the Hub holds now, and the event that tells of a new revision of a model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.errors import HTTPError as ConnectionFailed  # type: ignore[attr-defined]  # of httpx
from prefect import task
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event, Resource

from exl2flow.core.errors import HubError, HubUnavailable
from exl2flow.tasks.retries import RETRY_DELAYS_SECONDS, is_retryable

EVENT = "exl2flow.revision"
TIMEOUT_SECONDS = 30.0
TOO_MANY_REQUESTS, SERVER_ERRORS = 429, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A commit of a model repository: `org/name` and the commit's sha."""

    repo_id: str
    revision: str

    def event(self) -> Event:
        """Return the event that tells of it; its resource is `hf.model.org--name`."""
        resource = {
            "prefect.resource.id": f"hf.model.{self.repo_id.replace('/', '--')}",
            "prefect.resource.name": self.repo_id,
        }
        payload = {"repo_id": self.repo_id, "revision": self.revision}
        return Event(event=EVENT, resource=Resource(resource), payload=payload)


@task(
    name="look up revisions",
    retries=len(RETRY_DELAYS_SECONDS),
    retry_delay_seconds=RETRY_DELAYS_SECONDS,
    retry_condition_fn=is_retryable,
    persist_result=False,
)
def newest_revisions(repositories: Sequence[str], authors: Sequence[str]) -> list[Revision]:
    """Return the newest commit on the main branch of each repository, and of each of an author's.

    Raises:
        HubError: a repository does not exist or may not be read.
        HubUnavailable: the Hub does not answer, or refuses for now.
    """
    found: dict[str, Revision] = {}
    for repo_id, sha in _newest(repositories, authors):
        found.setdefault(repo_id, Revision(repo_id=repo_id, revision=sha))
    return list(found.values())


def _newest(repositories: Iterable[str], authors: Iterable[str]) -> Iterator[tuple[str, str]]:
    hub = HfApi()
    for repo_id in repositories:
        with _explained(f"the repository `{repo_id}`"):
            info = hub.model_info(repo_id, timeout=TIMEOUT_SECONDS)
        if info.sha:
            yield repo_id, info.sha
    for author in authors:
        with _explained(f"the models of `{author}`"):
            models = list(hub.list_models(author=author, expand=["sha"]))
        yield from ((model.id, model.sha) for model in models if model.sha)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == TOO_MANY_REQUESTS or status >= SERVER_ERRORS:
            raise HubUnavailable(f"the Hub cannot tell of {what} now (HTTP {status})") from error
        raise HubError(
            f"the Hub does not tell of {what} (HTTP {status}); check the name, and HF_TOKEN if it "
            "is private or gated"
        ) from error
    except HFValidationError as error:
        raise HubError(f"{what} cannot exist: {error}") from error
    except ConnectionFailed as error:
        raise HubUnavailable(f"the Hub does not answer about {what}: {error}") from error


def announce(revisions: Sequence[Revision]) -> None:
    """Tell the Prefect server of new revisions; it has them when this returns.

    Raises:
        httpx.HTTPStatusError: the server refused.
    """
    events = [revision.event().model_dump(mode="json") for revision in revisions]
    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=events).raise_for_status()
