"""A signal inside a sublayer: after the grace period every stage leaves within a few rows."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversions import small_config
from refinements import refine_until, refinement, rough_model
from stage_runs import run_until
from tiny import TEXT, make_tiny
from traces import contents, identity

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import TuneOptions
from exl2flow.core.runtime import interrupt
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.core.store.store import MANIFEST, StageFolder
from exl2flow.kernels import get_ops
from exl2flow.model import QuantizedMatrix, Tokenizer
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.mlp import MlpSublayer
from exl2flow.pipeline.stages import REFINE_STAGES, STAGES

CALLS = 3  # of what is counted, before the signal


def mixed_text(path: Path) -> Path:
    """Write a calibration file in which no two rows share 32 tokens."""
    draws, words = random.Random(0), " ".join(TEXT).split()
    records = [" ".join(draws.choices(words, k=30)) for _ in range(200)]
    pq.write_table(pa.table({"text": records}), path)
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A conversion with every stage of a source, up to the compiled model."""
    root = tmp_path_factory.mktemp("converted")
    config = small_config(
        make_tiny("llama", root / "model"),
        root / "out",
        bpw=4.0,
        quality="standard",
        calibration={
            "text": mixed_text(root / "text.parquet"),
            "rows": 6,
            "row_tokens": 64,
            "measure_rows": 5,
            "measure_row_tokens": 64,
        },
        sensitivity={"rows": 3},
        allocate={"rounds": 1},
        tune=TuneOptions(steps=2, interval=1, held_out_rows=2),
    )
    return run_until(config, "compile")


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], list[float]]:
    """Sends SIGINT in one of the calls of a method, and lists the calls that follow."""
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.0)

    def arrange(owner: type, name: str) -> list[float]:
        method = getattr(owner, name)
        calls: list[str] = []
        later: list[float] = []

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == CALLS:
                os.kill(os.getpid(), signal.SIGINT)
            elif len(calls) > CALLS:
                later.append(time.monotonic())
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
        return later

    return arrange


def before(pipeline: Pipeline, stage: str, stages: tuple[Stage, ...], root: Path) -> Pipeline:
    """Return a pipeline in a work root of its own with all that comes before a stage."""
    made = Pipeline(pipeline.config.model_copy(update={"work_root": root}), stages, device="cpu")
    for name in made.stages:
        if name == stage:
            return made
        shutil.copytree(pipeline.path(name), made.path(name))
    raise AssertionError(stage)


def results(pipeline: Pipeline, stage: str) -> dict[str, str]:
    files = contents(pipeline.path(stage))
    return {name: digest for name, digest in files.items() if name != "manifest.json"}


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("sensitivity", AttentionSublayer),
        ("measure", AttentionSublayer),
        ("allocate", MlpSublayer),
        ("quantize", MlpSublayer),
        ("tune", AttentionSublayer),
    ],
)
def test_a_sublayer_is_given_up_and_a_resume_gives_the_same_bytes(
    stage: str,
    kind: type,
    converted: Pipeline,
    signalled: Callable[[type, str], list[float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pipeline = before(converted, stage, STAGES, tmp_path)
    later = signalled(kind, "reads")
    with pytest.raises(Interrupted, match="everything finished is saved"):
        pipeline.run(stage, progress=silent)
    assert len(later) <= 1
    monkeypatch.undo()

    pipeline.run(stage, progress=silent)

    assert results(pipeline, stage) == results(converted, stage)


def test_rounding_is_given_up_between_panels(
    converted: Pipeline, signalled: Callable[[type, str], list[float]], tmp_path: Path
) -> None:
    pipeline = before(converted, "quantize", STAGES, tmp_path)
    later = signalled(type(get_ops("cpu")), "round_panel")

    with pytest.raises(Interrupted):
        pipeline.run("quantize", progress=silent)

    assert later == []


def test_text_is_given_up_between_records(
    converted: Pipeline, signalled: Callable[[type, str], list[float]], tmp_path: Path
) -> None:
    pipeline = before(converted, "tokenize", STAGES, tmp_path)
    later = signalled(Tokenizer, "encode")

    with pytest.raises(Interrupted):
        pipeline.run("tokenize", progress=silent)

    assert later == []


def test_the_comparison_of_the_compiled_model_is_given_up_between_matrices(
    converted: Pipeline, signalled: Callable[[type, str], list[float]], tmp_path: Path
) -> None:
    config = converted.config.model_copy(update={"out": tmp_path / "out"})
    moved = Pipeline(config.model_copy(update={"work_root": tmp_path}), STAGES, device="cpu")
    for name in moved.stages:
        if name == "compile":
            break
        shutil.copytree(converted.path(name), moved.path(name))
    later = signalled(QuantizedMatrix, "dequantize")

    with pytest.raises(Interrupted):
        moved.run("compile", progress=silent)

    assert later == []


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model that was converted roughly, refined and judged."""
    root = tmp_path_factory.mktemp("refined")
    return refine_until(refinement(*rough_model(root), root / "out"), "judge")


def test_judging_resumes_from_the_sublayer_where_it_was_stopped(
    refined: Pipeline, tmp_path: Path
) -> None:
    pipeline = before(refined, "judge", REFINE_STAGES, tmp_path)
    done: list[int] = []

    def sink(tick: Tick) -> None:
        done.append(tick.done)
        if tick.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="after 2 of 5; everything finished is saved"):
        pipeline.run("judge", progress=sink)

    pipeline.run("judge", progress=sink)

    assert done == [1, 2, 3, 4, 5]
    assert results(pipeline, "judge") == results(refined, "judge")


@pytest.mark.parametrize("stage", ["refine", "judge"])
def test_refining_and_judging_are_given_up_inside_a_sublayer(
    stage: str,
    refined: Pipeline,
    signalled: Callable[[type, str], list[float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pipeline = before(refined, stage, REFINE_STAGES, tmp_path)
    later = signalled(AttentionSublayer, "reads")
    with pytest.raises(Interrupted):
        pipeline.run(stage, progress=silent)
    assert len(later) <= 1
    monkeypatch.undo()

    pipeline.run(stage, progress=silent)

    assert results(pipeline, stage) == results(refined, stage)


STORED = ("tokenize", "sensitivity", "measure", "allocate", "quantize", "tune")


@pytest.mark.parametrize("stage", [*STORED, "refine", "judge"])
def test_a_stage_that_ended_behind_its_last_commit_writes_nothing_again(
    stage: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, stages = ("converted", STAGES) if stage in STORED else ("refined", REFINE_STAGES)
    pipeline = before(request.getfixturevalue(whole), stage, stages, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(StageFolder, "complete", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(stage, progress=silent)
    files = [path for path in pipeline.path(stage).rglob("*") if path.is_file()]
    written = {path: identity(path) for path in files if path.name != MANIFEST}

    pipeline.run(stage, progress=silent)

    assert written
    left = [path for path in written if not path.name.startswith("states-")]
    assert {path: identity(path) for path in left} == {path: written[path] for path in left}


def killed(folder: StageFolder) -> None:
    raise KeyboardInterrupt
