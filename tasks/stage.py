"""A stage as a Prefect task: cached by its fingerprint, retried only if that can help.

The disk is the truth and Prefect's cache a shortcut: a stage whose files are missing or altered
runs again whatever the cache says, and a complete one counts as cached whoever completed it.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from functools import partial

from prefect import Task
from prefect.states import Completed

from exl2flow.core.progress import Tick, report
from exl2flow.core.stage import Pipeline
from exl2flow.core.store import StageRef
from exl2flow.tasks import allocate, quantize, validate
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact
from exl2flow.tasks.retries import RETRIED

PUBLISHERS: Mapping[str, Callable[[Pipeline, Artifacts], None]] = {
    "allocate": allocate.publish,
    "quantize": quantize.publish,
    "validate": validate.publish,
}


def stage_task(
    pipeline: Pipeline, name: str, artifacts: Artifacts, *, label: str = ""
) -> Task[[Mapping[str, StageRef]], StageRef]:
    """Return the task of one stage; it takes the references of the stages it reads.

    Args:
        pipeline: contains the stage.
        name: the stage.
        artifacts: receives its progress.
        label: prefix for the name of the task's run.
    """
    ref = pipeline.refs[name]
    complete = pipeline.is_complete(name)

    def run(inputs: Mapping[str, StageRef]) -> StageRef:
        if complete:
            return Completed(name="Cached", data=ref)  # type: ignore[return-value]  # Prefect unwraps
        with closing(ProgressArtifact(artifacts, name)) as progress:
            return pipeline.run(name, progress=progress)

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


def run_stages(
    pipeline: Pipeline, *, label: str = "", done: Collection[str] = ()
) -> dict[str, StageRef]:
    """Run the stages of a pipeline as tasks, in order, inside a flow.

    Args:
        pipeline: the stages.
        label: distinguishes its tasks and artifacts from other pipelines in the same flow.
        done: stages that already ran on their own.
    """
    artifacts = Artifacts(f"{pipeline.config.source.resolve().name} {label}")
    refs = {name: pipeline.refs[name] for name in done if name in pipeline.refs}
    for name, stage in pipeline.stages.items():
        if name in refs:
            continue
        if pipeline.is_complete(name):
            report(Tick(stage=name, done=1, total=1, detail="cached"))
        task = stage_task(pipeline, name, artifacts, label=label)
        refs[name] = task({key: refs[key] for key in stage.inputs if key in refs})
        if name in PUBLISHERS and pipeline.work.is_complete(pipeline.refs[name]):
            artifacts.attempt(partial(PUBLISHERS[name], pipeline, artifacts))
    return refs
