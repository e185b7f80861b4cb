"""A stage as a Prefect task: cached under its fingerprint, retried only when that can help.

The disk is the truth and Prefect's cache a shortcut: a stage whose files are gone or altered is run
again whatever the cache says, and one that is complete counts as cached whoever completed it.
"""

from collections.abc import Callable, Mapping
from functools import partial

from prefect import Task
from prefect.states import Completed

from exl2flow.core.progress import Tick, report
from exl2flow.core.stage import Pipeline
from exl2flow.core.store import StageRef
from exl2flow.tasks import allocate, quantize, validate
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact
from exl2flow.tasks.retries import RETRY_DELAYS_SECONDS, is_retryable

PUBLISHERS: Mapping[str, Callable[[Pipeline, Artifacts], None]] = {
    "allocate": allocate.publish,
    "quantize": quantize.publish,
    "validate": validate.publish,
}


def stage_task(
    pipeline: Pipeline, name: str, artifacts: Artifacts
) -> Task[[Mapping[str, StageRef]], StageRef]:
    """Return the task of one stage; it takes the references of the stages it reads."""
    ref = pipeline.refs[name]
    complete = pipeline.is_complete(name)

    def run(inputs: Mapping[str, StageRef]) -> StageRef:
        if complete:
            return Completed(name="Cached", data=ref)  # type: ignore[return-value]  # Prefect unwraps
        return pipeline.run(name, progress=ProgressArtifact(artifacts, name))

    return Task(
        run,
        name=name,
        task_run_name=name,
        cache_key_fn=lambda context, parameters: f"{name}-{ref.fingerprint}",
        persist_result=True,
        result_serializer="json",
        result_storage=pipeline.work.root / "prefect",
        refresh_cache=not complete,
        retries=len(RETRY_DELAYS_SECONDS),
        retry_delay_seconds=RETRY_DELAYS_SECONDS,
        retry_condition_fn=is_retryable,
    )


def run_stages(pipeline: Pipeline) -> dict[str, StageRef]:
    """Run all stages of a pipeline as tasks, in order, inside a flow."""
    artifacts = Artifacts(pipeline.config.source.resolve().name)
    refs: dict[str, StageRef] = {}
    for name, stage in pipeline.stages.items():
        if pipeline.is_complete(name):
            report(Tick(stage=name, done=1, total=1, detail="cached"))
        task = stage_task(pipeline, name, artifacts)
        refs[name] = task({key: refs[key] for key in stage.inputs if key in refs})
        if name in PUBLISHERS:
            artifacts.attempt(partial(PUBLISHERS[name], pipeline, artifacts))
    return refs
