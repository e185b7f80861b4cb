"""A run inside a Prefect flow: its steps are tasks, its results also artifacts."""

from typing import Any

from prefect import Flow, Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.flows.runs.bitrates import Sweep, check_runner
from exl2flow.flows.runs.local import RUNS, Steps, carry_out
from exl2flow.flows.runs.release import check_release, target_of
from exl2flow.flows.runs.runners import make_all
from exl2flow.tasks.compare import publish_comparison
from exl2flow.tasks.hub_tasks import branch_links, fetched_in_flow, publish_models
from exl2flow.tasks.logs import logged
from exl2flow.tasks.retries import RETRIED
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.tags import tag_run

check_publication = Task(
    check_release,
    name="check publication",
    task_run_name="check {config.publish.repo}",
    persist_result=False,
    **RETRIED,
)


def _check(config: RunOptions) -> None:
    if isinstance(config, SweepConfig):
        check_runner(config)
    if target_of(config) is not None:
        check_publication(config)


def _show(config: SweepConfig, sweep: Sweep) -> None:
    """Publish the comparison of a sweep's bitrates as artifacts."""
    links = branch_links(sweep.published) if sweep.published else None
    publish_comparison(config.source, config.run_name, sweep.scores, sweep.samples, links=links)


TASKS = Steps(
    check=_check,
    fetched=fetched_in_flow,
    run=run_stages,
    make_bitrates=make_all,
    show=_show,
    publish=publish_models,
)


def run_in_flow(name: str, config: RunOptions, *tags: str) -> Any:
    """Return the result of a run of `RUNS` inside the flow that calls this; `tags` name its run."""
    with logged():
        tag_run(config.source, *tags)
        return carry_out(RUNS[name], config, TASKS)


def cancelled_if_interrupted(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Mark a failed run as cancelled if a signal ended it; a hook of flows."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, Interrupted):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(message=str(error)), force=True)
