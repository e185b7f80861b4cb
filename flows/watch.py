"""The flow `watch`: look for new revisions on the Hub, and emit an event for each."""

from datetime import UTC, datetime

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.states import Cancelled

from exl2flow.core.options.watch import WatchConfig as WatchConfig
from exl2flow.core.store.files import read_json, write_json
from exl2flow.flows.runs.endings import ending
from exl2flow.tasks.logs import logged
from exl2flow.tasks.revisions import Revision, announce, newest_revisions

WATCHED = "watched"  # stored as the commit of an author


@flow(flow_run_name="{config.run_name}", persist_result=False)
@ending
def watch(config: WatchConfig) -> list[Revision]:
    """Announce the revisions that are new since the last run by an event each, and return them.

    They are stored after the events: a run that is killed in between announces some twice, and
    misses none.

    Raises:
        HubError: a repository cannot be read.
        CorruptCheckpoint: the file of last seen revisions is damaged.
    """
    with logged():
        _cancel_overdue()
        file = config.work_root / "revisions.json"
        seen: dict[str, str] = read_json(file) if file.exists() else {}
        revisions = newest_revisions(config.repositories, config.authors)
        new = [r for r in revisions if _is_new(r, seen, include_existing=config.include_existing)]
        if new:
            announce(new)
        file.parent.mkdir(parents=True, exist_ok=True)
        looked_at = {_all_of(author): WATCHED for author in config.authors}
        write_json(file, {**seen, **looked_at, **{r.repo_id: r.revision for r in revisions}})
        return new


def _cancel_overdue() -> None:
    """Cancel what is due as well in this run's deployment, see `cancel_same`."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        with get_client(sync_client=True) as client:
            cancel_same(client, context.flow_run)


def cancel_same(client: SyncPrefectClient, run: FlowRun) -> None:
    """Cancel runs that are due as well and look at the same, because this run does it for them.

    After a long conversion on the only worker, all looks that it held up are due.
    """
    if run.deployment_id is None:
        return
    where = {
        "deployment_id": {"any_": [run.deployment_id]},
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "expected_start_time": {"before_": datetime.now(UTC)},
    }
    for other in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(where)):
        if other.parameters == run.parameters and other.id != run.id:
            client.set_flow_run_state(other.id, Cancelled(message=f"`{run.name}` looks for it"))


def _all_of(author: str) -> str:
    """Return the key in the file that says that an author was looked at."""
    return f"{author.lower()}/*"  # the Hub ignores case in names of authors


def _is_new(revision: Revision, seen: dict[str, str], *, include_existing: bool) -> bool:
    """Return whether a commit is news; a repository's first one is if its author was known."""
    if revision.repo_id not in seen:
        return include_existing or _all_of(revision.repo_id.partition("/")[0]) in seen
    return seen[revision.repo_id] != revision.revision
