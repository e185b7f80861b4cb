"""A stage as a Prefect task: cached by its fingerprint, retried only when that can help.

The disk decides, not Prefect's cache: a stage with missing or changed files runs again whatever the
cache says, and a complete one counts as cached whoever completed it.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from functools import partial

from prefect import Task
from prefect.states import Cancelled, Completed
from prefect.transactions import Transaction, get_transaction

from exl2flow.core.errors import Interrupted
from exl2flow.core.store.changes import outlook
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import StageRef
from exl2flow.pipeline.stages import run_in_order
from exl2flow.tasks import allocate, judge, quantize, validate
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact
from exl2flow.tasks.retries import RETRIED

PUBLISHERS: Mapping[str, Callable[[Pipeline, Artifacts], None]] = {
    "allocate": allocate.publish,
    "quantize": quantize.publish,
    "judge": judge.publish,
    "validate": validate.publish,
}


def stage_task(
    pipeline: Pipeline, name: str, artifacts: Artifacts, *, label: str = ""
) -> Task[[Mapping[str, StageRef]], StageRef]:
    """Return the task that runs one stage; its argument is the references of the stages it reads.

    Args:
        pipeline: the pipeline of the stage.
        name: name of the stage.
        artifacts: where to publish its progress.
        label: prefix for the name of the task run.
    """
    ref = pipeline.refs[name]
    complete = pipeline.is_complete(name)

    def run(inputs: Mapping[str, StageRef]) -> StageRef:
        if complete:
            return Completed(name="Cached", data=ref)  # type: ignore[return-value]  # Prefect unwraps
        try:
            with closing(ProgressArtifact(artifacts, name)) as progress:
                return pipeline.run(name, progress=progress)
        except Interrupted as stop:
            if isinstance(transaction := get_transaction(), Transaction):
                transaction.rollback()  # or the state would be cached as a result
            # Prefect takes it as the task's state
            return Cancelled(message=str(stop), data=stop)  # type: ignore[return-value]

    return Task(
        run,
        name=name,
        task_run_name=f"{label} {name}".lstrip(),
        cache_key_fn=lambda context, parameters: f"{name}-{ref.fingerprint}",
        persist_result=True,
        result_serializer="json",
        result_storage=pipeline.work.root / "prefect",
        refresh_cache=not complete,
        **RETRIED,
    )


def publish_outlook(pipeline: Pipeline, artifacts: Artifacts, done: Collection[str]) -> None:
    """Publish what the run does with every stage and why, if it has results of an earlier one."""
    stages = [stage for stage in outlook(pipeline) if stage.stage not in done]
    if any(stage.state != "begins" for stage in stages):
        rows = [stage.row({}) for stage in stages]
        artifacts.table("why", rows, "What this run does with every stage, and what changed")


def run_stages(
    pipeline: Pipeline, *, label: str = "", done: Collection[str] = ()
) -> dict[str, StageRef]:
    """Run the stages of a pipeline as tasks, in order, inside a flow.

    Args:
        pipeline: the stages.
        label: distinguishes its tasks and artifacts from those of other pipelines in the same flow.
        done: names of stages that ran before, outside of this call.
    """
    artifacts = Artifacts(f"{pipeline.config.source.resolve().name} {label}")
    refs = {name: pipeline.refs[name] for name in done if name in pipeline.refs}
    artifacts.attempt(partial(publish_outlook, pipeline, artifacts, done))

    def run(name: str) -> None:
        task = stage_task(pipeline, name, artifacts, label=label)
        inputs = pipeline.stages[name].inputs
        state = task({key: refs[key] for key in inputs if key in refs}, return_state=True)
        refs[name] = state.result()  # raises what ended the stage
        if name in PUBLISHERS and pipeline.is_complete(name):
            artifacts.attempt(partial(PUBLISHERS[name], pipeline, artifacts))

    run_in_order(pipeline, run, done=refs.keys())
    return refs
