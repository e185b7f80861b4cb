"""Pipelines of stages that write one note each, and say in `RAN` that they ran."""

from collections.abc import Callable

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import digest, write_text
from exl2flow.core.store.stage import Pipeline, Stage, StageRun

RAN: list[str] = []  # the stages that really ran, in order


def write_note(run: StageRun) -> None:
    """Write one file that tells the inputs and the options."""
    RAN.append(run.folder.manifest.stage)
    inputs = {name: (path / "note").read_text() for name, path in run.inputs.items()}
    write_text(run.folder.path / "note", f"{run.folder.manifest.options}{inputs}")
    run.folder.commit("note", digest(run.folder.path / "note"), cursor=1)
    run.tick(1, 1, "noted")


def stage(
    name: str,
    *inputs: str,
    options: Callable[[ConversionConfig], dict[str, object]] = lambda config: {},
    schema: int = 1,
    run: Callable[[StageRun], None] = write_note,
) -> Stage:
    return Stage(name=name, schema=schema, inputs=inputs, options=options, run=run)


CHAIN = (
    stage("measure", options=lambda config: {"rows": config.calibration.measure_rows}),
    stage("allocate", "measure", options=lambda config: {"bpw": config.bpw}),
    stage("compile", "allocate"),
)


def run_all(
    config: ConversionConfig, stages: tuple[Stage, ...] = CHAIN, *, device: str = "cpu"
) -> Pipeline:
    pipeline = Pipeline(config, stages, device=device)
    for name in pipeline.stages:
        pipeline.run(name, progress=silent)
    return pipeline


def with_options(config: ConversionConfig, **values: object) -> ConversionConfig:
    return ConversionConfig(source=config.source, out=config.out, **values)
