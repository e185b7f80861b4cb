"""A run inside a Prefect flow: its steps are tasks, its results also artifacts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State
from prefect.states import Failed

from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.whole_run import Watcher
from exl2flow.flows.runs.runners import make_all, share_out
from exl2flow.pipeline.bitrates import Sweep
from exl2flow.pipeline.local import RUNS, check_and_carry_out, output_of
from exl2flow.pipeline.release import check_release
from exl2flow.pipeline.run import Run, Sources, Steps
from exl2flow.tasks.artifacts import run_artifact
from exl2flow.tasks.compare import publish_comparison
from exl2flow.tasks.hub_tasks import (
    branch_links,
    fetched_in_flow,
    outlined_in_flow,
    publish_models,
)
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


def _check(run: Run, config: RunOptions) -> None:
    run.check(config)
    if config.publication is not None:
        check_publication(config)


def _show(config: SweepConfig, sweep: Sweep) -> None:
    """Publish the comparison of a sweep's bitrates as artifacts."""
    links = branch_links(sweep.published) if sweep.published else None
    publish_comparison(config.source, config.run_name, sweep.scores, sweep.samples, links=links)


MOST_LETTERS = 191  # of a reason in a graph


@contextmanager
def _watched(config: RunOptions) -> Iterator[Watcher]:
    """Show how far the run is on its page, also why it was refused before it had a task."""
    with run_artifact(config.source.resolve().name, output_of(config)) as watcher:
        try:
            yield watcher
        except Exl2FlowError as error:
            if not watcher.run.stages and not isinstance(error, Interrupted):
                refused(str(error).partition("\n")[0][:MOST_LETTERS])
            raise


@task(name="refused", task_run_name="refused: {reason}", persist_result=False)
def refused(reason: str) -> State[None]:
    """Fail with a reason, which the graph of a run without other tasks then shows."""
    return Failed(message=reason)


TASKS = Steps(
    check=_check,
    sources=Sources(outlined=outlined_in_flow, fetched=fetched_in_flow),
    run=run_stages,
    make_bitrates=make_all,
    share_out=share_out,
    show=_show,
    publish=publish_models,
    watch=_watched,
)


def run_in_flow(name: str, config: RunOptions, *tags: str) -> Any:
    """Return the result of a run of `RUNS` inside the flow that calls this; `tags` name its run."""
    with logged():
        tag_run(config.source, *tags)
        return check_and_carry_out(RUNS[name], config, TASKS)
