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
from resumed import before, results
from stage_runs import calibrated_on, run_until
from tiny import TEXT, make_tiny
from traces import identity

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import TuneOptions
from exl2flow.core.runtime import interrupt
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import MANIFEST, StageFolder
from exl2flow.kernels import get_ops
from exl2flow.model import QuantizedMatrix, Tokenizer
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.mlp import MlpSublayer

CALLS = 3  # of what is counted, before the signal
STORED = ("tokenize", "sensitivity", "measure", "allocate", "quantize", "tune")


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
        make_tiny("llama", root / "model", num_hidden_layers=1),
        root / "out",
        bpw=4.0,
        quality="standard",
        calibration=calibrated_on(mixed_text(root / "text.parquet"), (6, 64), (5, 64)),
        sensitivity={"rows": 3},
        allocate={"rounds": 1},
        tune=TuneOptions(steps=2, interval=1, held_out_rows=2),
    )
    return run_until(config, "compile")


@pytest.fixture(scope="module")
def refined(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model that was converted roughly, refined and judged."""
    root = tmp_path_factory.mktemp("refined")
    return refine_until(refinement(*rough_model(root), root / "out"), "judge")


@pytest.fixture
def whole(stage: str, request: pytest.FixtureRequest) -> Pipeline:
    """The pipeline that has run a stage."""
    found: Pipeline = request.getfixturevalue("converted" if stage in STORED else "refined")
    return found


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


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("sensitivity", AttentionSublayer),
        ("measure", AttentionSublayer),
        ("allocate", MlpSublayer),
        ("quantize", MlpSublayer),
        ("tune", AttentionSublayer),
        ("refine", AttentionSublayer),
        ("judge", AttentionSublayer),
    ],
)
def test_a_sublayer_is_given_up_and_a_resume_gives_the_same_bytes(
    stage: str,
    kind: type,
    whole: Pipeline,
    signalled: Callable[[type, str], list[float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pipeline = before(whole, stage, tmp_path)
    later = signalled(kind, "reads")
    with pytest.raises(Interrupted, match="everything finished is saved"):
        pipeline.run(stage, progress=silent)
    assert len(later) <= 1
    monkeypatch.undo()

    pipeline.run(stage, progress=silent)

    assert results(pipeline, stage) == results(whole, stage)


@pytest.mark.parametrize(
    ("stage", "owner", "method"),
    [
        ("quantize", type(get_ops("cpu")), "round_panel"),
        ("tokenize", Tokenizer, "encode"),
        ("compile", QuantizedMatrix, "dequantize"),
    ],
    ids=["panels", "records", "matrices of the compiled model"],
)
def test_work_is_given_up_between(
    stage: str,
    owner: type,
    method: str,
    converted: Pipeline,
    signalled: Callable[[type, str], list[float]],
    tmp_path: Path,
) -> None:
    pipeline = before(converted, stage, tmp_path, out=tmp_path / "out")
    later = signalled(owner, method)

    with pytest.raises(Interrupted):
        pipeline.run(stage, progress=silent)

    assert later == []


def test_judging_resumes_from_the_sublayer_where_it_was_stopped(
    refined: Pipeline, tmp_path: Path
) -> None:
    pipeline = before(refined, "judge", tmp_path)
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


@pytest.mark.parametrize("stage", [*STORED, "refine", "judge"])
def test_a_stage_that_ended_behind_its_last_commit_writes_nothing_again(
    stage: str, whole: Pipeline, tmp_path: Path
) -> None:
    pipeline = before(whole, stage, tmp_path)
    shutil.copytree(whole.path(stage), pipeline.path(stage))
    folder = StageFolder.load(pipeline.path(stage), pipeline.refs[stage].fingerprint)
    assert folder is not None
    folder.manifest.status = "partial"
    folder.save()
    files = [path for path in pipeline.path(stage).rglob("*") if path.is_file()]
    written = {path: identity(path) for path in files if path.name != MANIFEST}

    pipeline.run(stage, progress=silent)

    assert written
    assert {path: identity(path) for path in written} == written
    assert pipeline.is_complete(stage)
