"""Conversions that several processes share: killed or not, nobody can tell from the result."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conversions import small_config
from crash import NORMAL, Conditions, Conversion, Run, members
from stage_runs import calibrated_on, text_parquet
from tiny import make_tiny
from traces import contents, leftovers

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import REFINE_STAGES, STAGES, run_in_order

MEMBER = b"core.store.crew_member"
TWO = ("--gpus", "2", "--device", "cpu")
SAVING = Conditions(states_seconds=0.0)


def followers(run: Run) -> list[int]:
    """Return the processes of a run that work beside its first one."""
    found = []
    for pid in members(session=run.pid):
        try:
            if MEMBER in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def begun(conversion: Conversion, stage: str, results: int, conditions: Conditions) -> Run:
    """Start or resume a run; return once a stage has `results` results and a follower runs."""
    run = conversion.start(conditions)

    def is_there() -> bool:
        left = conversion.manifest(stage)
        return left["status"] != "absent" and left["cursor"] >= results and bool(followers(run))

    run.until(is_there)
    return run


def kill_follower(run: Run) -> None:
    (follower,) = followers(run)
    os.kill(follower, signal.SIGKILL)
    ended = run.wait()
    assert ended.code == 1, ended.err
    assert "rank 1 of 2 ended with status -9; repeat the command" in ended.err
    assert "Traceback" not in ended.err


def kill_leader(run: Run) -> None:
    run.send(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL


def stop(run: Run) -> None:
    run.send(signal.SIGINT)
    ended = run.wait()
    assert ended.code == 130, ended.err
    assert "is saved" in ended.err


def test_two_ranks_that_are_killed_write_the_bytes_of_one(
    undisturbed: Conversion, tmp_path: Path
) -> None:
    conversion = undisturbed.after("tokenize", tmp_path)
    two = replace(conversion, options=TWO)

    kill_follower(begun(two, "sensitivity", 2, NORMAL))
    assert two.manifest("sensitivity")["status"] == "partial"
    kill_leader(begun(two, "quantize", 2, SAVING))
    assert two.manifest("quantize")["status"] == "partial"
    two.finish()

    assert two.results() == undisturbed.results()
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_what_two_ranks_begin_one_can_finish(undisturbed: Conversion, tmp_path: Path) -> None:
    conversion = undisturbed.after("allocate", tmp_path)

    stop(begun(replace(conversion, options=TWO), "quantize", 2, SAVING))
    left = conversion.manifest("quantize")
    conversion.finish()

    assert left["status"] == "partial"
    assert left["states"] is not None
    assert conversion.results() == undisturbed.results()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sensitivity", "measure", "quantize", "validate"])
@pytest.mark.parametrize("kill", [kill_follower, kill_leader])
def test_kills_of_either_rank_leave_no_trace(
    stage: str, kill: Callable[[Run], None], undisturbed: Conversion, tmp_path: Path
) -> None:
    conversion = Conversion.inside(tmp_path, undisturbed.source, *TWO)

    most = 3 if stage == "validate" else 6
    for results in (0, 1, 2, 3, 4, 5, 6, 6):
        kill(begun(conversion, stage, min(results, most), SAVING if results % 2 else NORMAL))
    conversion.finish()

    assert conversion.results() == undisturbed.results()
    assert leftovers(tmp_path) == []


def trained(root: Path, source: Path, layers: int, gpus: str) -> dict[str, str]:
    """Train a model, refine and train it again; return the digests of both, by path."""
    options = {
        "gpus": gpus,
        "sensitivity": {"rows": 6},
        "rounding": {"rounds": 1, "block_steps": 2},
        "tune": {"steps": 2, "interval": 1, "layers": layers},
        "calibration": calibrated_on(text_parquet(root / "text.parquet"), (9, 64), (2, 64)),
    }
    config = small_config(source, root / "out", quality="best", bpw=5.0, **options)
    run_in_order(open_pipeline(config, STAGES))
    old = {"model": config.out, "source": source, "out": root / "refined", "device": "cpu"}
    short = {"rows": 1, "row_tokens": 64, "sample_tokens": 0, "fail_perplexity_ratio": 100}
    refinement = RefinementConfig.model_validate({**old, **options, "validate_options": short})
    run_in_order(open_pipeline(refinement, REFINE_STAGES))
    folders = {"out": config.out, "refined": refinement.out}
    tensors = {name: contents(folder) for name, folder in folders.items()}
    return {
        f"{name}/{file}": digest
        for name, files in tensors.items()
        for file, digest in files.items()
        if file.endswith(".safetensors")
    }


@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen2-moe"])
def test_two_ranks_train_what_one_does(family: str, layers: int, tmp_path: Path) -> None:
    source = make_tiny(family, tmp_path / "model")
    roots = [tmp_path / gpus for gpus in "12"]
    for root in roots:
        root.mkdir()

    alone, together = (trained(root, source, layers, root.name) for root in roots)

    assert together == alone
    assert len(alone) == 2
