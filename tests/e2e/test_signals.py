"""A signal lets the current sublayer finish, a second one does not; both leave what can go on."""

import shlex
import signal
import time
from pathlib import Path

import pytest
from crash import STAGES, Conditions, Conversion, catches, members, program
from traces import leftovers

SLOW = Conditions(flush_seconds=0.05)
VERY_SLOW = Conditions(flush_seconds=0.4)  # a commit takes 1.6 s: time for a second signal
RESUME = "resume with:\n  "
CODES = [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("signum", "code"), CODES)
@pytest.mark.parametrize(
    ("stage", "before"),
    [
        pytest.param("sensitivity", "tokenize", marks=pytest.mark.slow),
        pytest.param("measure", "sensitivity", marks=pytest.mark.slow),
        ("quantize", "allocate"),
    ],
)
def test_a_signal_commits_the_sublayer_and_tells_how_to_resume(
    undisturbed: Conversion, tmp_path: Path, stage: str, before: str, signum: int, code: int
) -> None:
    conversion = undisturbed.after(before, tmp_path)
    run = conversion.start(SLOW)
    run.until(lambda: conversion.manifest(stage)["cursor"] >= 3)

    run.send(signum)
    ended = run.wait()

    left = conversion.manifest(stage)
    assert ended.code == code
    assert left["status"] == "partial"
    backward = stage == "sensitivity"  # from the head on
    assert left["states"]["index"] == left["total"] - left["cursor"] if backward else left["cursor"]
    assert f"stopped in stage `{stage}` after {left['cursor']} of {left['total']}" in ended.err
    assert "Traceback" not in ended.err
    assert leftovers(tmp_path) == members(session=run.pid) == []
    command = shlex.split(ended.err.partition(RESUME)[2])
    assert command == ["exl2flow", *conversion.arguments]
    if signum == signal.SIGINT and stage == "quantize":
        resumed = program().start(command[1:]).wait()
        assert resumed.code == 0, resumed.err
        assert conversion.results() == undisturbed.results()
    elif signum == signal.SIGINT:
        conversion.finish_stage(stage)
        assert conversion.made_by(stage) == undisturbed.made_by(stage)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), CODES)
def test_a_second_signal_ends_the_process_at_once(
    undisturbed: Conversion, tmp_path: Path, signum: int, code: int
) -> None:
    conversion = undisturbed.after("allocate", tmp_path)
    run = conversion.start(VERY_SLOW)
    run.until(lambda: conversion.manifest("quantize")["cursor"] >= 1)
    run.send(signum)
    run.until(lambda: "stopping after the current sublayer" in run.printed())
    before = conversion.manifest("quantize")["cursor"]

    run.send(signum)
    ended = run.wait()

    assert ended.code == code
    assert RESUME not in ended.err
    assert conversion.manifest("quantize")["cursor"] == before
    assert members(session=run.pid) == []
    conversion.finish_stage("quantize")
    assert conversion.made_by("quantize") == undisturbed.made_by("quantize")


@pytest.mark.parametrize(
    ("stage", "before", "left"),
    [
        ("tokenize", None, {"complete", "partial"}),  # partial on a slow machine
        ("allocate", "measure", {"complete"}),
        ("compile", "quantize", {"partial"}),
        pytest.param("validate", "quantize", {"partial"}, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_stage_without_sublayers_is_not_lost(
    undisturbed: Conversion, tmp_path: Path, stage: str, before: str | None, left: set[str]
) -> None:
    conversion = undisturbed.after(before, tmp_path)
    run = conversion.start(SLOW)
    run.until(lambda: conversion.manifest(stage)["status"] == "partial")

    run.send(signal.SIGTERM)
    ended = run.wait()

    following = STAGES[STAGES.index(stage) + 1 :]
    assert ended.code == 143
    assert RESUME in ended.err
    assert conversion.manifest(stage)["status"] in left
    assert {conversion.manifest(name)["status"] for name in following} <= {"absent"}
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_ctrl_c_at_the_start_shows_no_traceback(
    undisturbed: Conversion, tmp_path: Path, delay: float
) -> None:
    run = undisturbed.after(None, tmp_path).start()
    run.until(lambda: catches(run.pid, signal.SIGTERM))  # the program has begun
    time.sleep(delay)

    run.send(signal.SIGINT)
    ended = run.wait()

    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
