"""A run inside a Prefect flow: its steps are tasks, its results also artifacts."""

from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.store.stage import Pipeline
from exl2flow.flows.runs.bitrates import Sweep, check_runner
from exl2flow.flows.runs.conversion import Conversion
from exl2flow.flows.runs.local import RUNS, Local, carry_out
from exl2flow.flows.runs.preparation import Config, with_folder
from exl2flow.flows.runs.release import target_of
from exl2flow.flows.runs.runners import make_all
from exl2flow.tasks.compare import publish_comparison
from exl2flow.tasks.fetch import fetched_in_flow
from exl2flow.tasks.logs import logged
from exl2flow.tasks.publish import Published
from exl2flow.tasks.publishing import branch_links, check_publication, publish_models
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.tags import tag_run


class InFlow(Local):
    """The steps of a run as tasks of the calling flow."""

    def check(self, config: RunOptions) -> None:
        """See `Local`; also check what runs the bitrates of a sweep."""
        if isinstance(config, SweepConfig):
            check_runner(config)
        if (target := target_of(config)) is not None:
            check_publication(target, config.source, config.work_dir_root, config.token_block)

    def with_folder(self, config: Config) -> Config:
        """See `Local`; a Hub model is fetched."""
        return with_folder(config, fetched_in_flow)

    def run(self, pipeline: Pipeline) -> None:
        """See `Local`."""
        run_stages(pipeline)

    def make_bitrates(self, config: SweepConfig, stop: StopRequest) -> dict[str, BaseException]:
        """See `Local`; several at a time if configured."""
        return make_all(config, stop)

    def show(self, config: RunOptions, made: Conversion | Sweep) -> None:
        """Publish the comparison of a sweep's bitrates as artifacts."""
        if isinstance(made, Sweep) and isinstance(config, SweepConfig):
            links = branch_links(made.published) if made.published else None
            title = config.run_name
            publish_comparison(config.source, title, made.scores, made.samples, links=links)

    def publish(self, release: PublishConfig) -> Published:
        """See `Local`."""
        return publish_models(release)


def run_in_flow(name: str, config: RunOptions, *tags: str) -> Any:
    """Return the result of a run of `RUNS` inside the flow that calls this; `tags` name its run."""
    with logged():
        tag_run(config.source, *tags)
        return carry_out(RUNS[name], config, InFlow())


def cancelled_if_interrupted(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Mark a failed run as cancelled if a signal ended it; a hook of flows."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, Interrupted):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(message=str(error)), force=True)
