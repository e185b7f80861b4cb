"""Conversions that several processes share: killed or not, nobody can tell from the result."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from crash import NORMAL, Conditions, Conversion, Run, members
from traces import leftovers

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
