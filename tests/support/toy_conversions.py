"""Conversions of toy stages: real folders, manifests and outputs, and nothing that takes time."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.cleaning import Item
from exl2flow.core.store.files import digest, write_tensors, write_text
from exl2flow.core.store.stage import Pipeline, Stage, StageRun

RAN: list[str] = []
FAILING: set[str] = set()


def noted(run: StageRun) -> None:
    name = run.folder.manifest.stage
    RAN.append(name)
    write_text(run.folder.path / "note", name)
    run.folder.commit("note", digest(run.folder.path / "note"), cursor=1)
    if name in FAILING:
        raise Exl2FlowError("half way")


def quantized(run: StageRun) -> None:
    noted(run)
    for index in range(2):
        name = f"sublayers/{index}.safetensors"
        sha256 = write_tensors(run.folder.path / name, {"q": torch.full((1000,), index)})
        run.folder.commit(name, sha256, cursor=index + 1)


def compiled(run: StageRun) -> None:
    noted(run)
    for path in sorted((run.inputs["quantize"] / "sublayers").iterdir()):
        target = run.config.out / path.name
        write_text(target, str(run.folder.manifest.fingerprint))
        run.folder.commit(str(target), digest(target))


def places(config: ConversionConfig) -> dict[str, object]:
    return {"out": str(config.out.resolve()), "source": str(config.source.resolve())}


def stage(
    name: str,
    *inputs: str,
    options: Callable[[ConversionConfig], dict[str, object]] = lambda config: {},
    run: Callable[[StageRun], None] = noted,
    removable: bool = False,
) -> Stage:
    return Stage(name=name, schema=1, inputs=inputs, options=options, run=run, removable=removable)


STAGES = (
    stage("measure"),
    stage("allocate", "measure", options=lambda config: {"bpw": config.bpw}),
    stage("quantize", "allocate", run=quantized, removable=True),
    stage("compile", "allocate", "quantize", options=places, run=compiled),
    stage("validate", "compile", options=lambda c: {"rows": c.validate_options.rows}),
)


def model(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(content)
    return folder


def other(config: ConversionConfig, **values: object) -> ConversionConfig:
    return config.model_copy(update=values)


def convert(config: ConversionConfig) -> Pipeline:
    pipeline = Pipeline(config, STAGES, device="cpu")
    for name in pipeline.stages:
        if not pipeline.is_complete(name):
            pipeline.run(name, progress=silent)
    return pipeline


def begun(config: ConversionConfig, failing: str) -> Pipeline:
    """Return a conversion that ended in one of its stages."""
    FAILING.add(failing)
    with pytest.raises(Exl2FlowError, match="half way"):
        convert(config)
    FAILING.clear()
    return Pipeline(config, STAGES, device="cpu")


def stages_of(pipeline: Pipeline, *names: str) -> set[Path]:
    return {pipeline.path(name) for name in names}


def paths(items: list[Item], *, tensors: bool = False) -> set[Path]:
    return {item.path for item in items if item.is_tensors == tensors}
