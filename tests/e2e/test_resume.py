"""A conversion that is killed goes on where it was, and nobody can tell from the result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crash import LAYERS, STAGES, Conditions, Conversion
from traces import contents, identities, leftovers

# SIGKILLs come when so many results are committed; the stages have 7, 7, 7 and 4.
KILLS = {
    "sensitivity": (1, 2, 4, 5),
    "measure": (1, 3, 5),
    "quantize": (2, 4, 5),
    "compile": (1, 2, 3),
}
FLUSH_SECONDS = 0.03  # keeps a process long enough in every phase of a commit
DELAYS = (0.0, 0.025, 0.05, 0.01)  # after the manifest shows a result; a commit flushes four times
REPLAYED = Conditions(flush_seconds=FLUSH_SECONDS)  # states every 20 s: never in time here
FROM_STATES = Conditions(flush_seconds=FLUSH_SECONDS, states_seconds=0.0)


def is_inside(manifest: dict[str, Any]) -> bool:
    """Tell whether a stage has begun its results and not finished them."""
    cursor: int = manifest["cursor"]
    return manifest["status"] == "partial" and 0 < cursor < manifest["total"]


@pytest.mark.slow
@pytest.mark.parametrize("conditions", [REPLAYED, FROM_STATES], ids=["replayed", "from states"])
def test_thirteen_kills_leave_no_trace_in_the_result(
    undisturbed: Conversion, conditions: Conditions, tmp_path: Path
) -> None:
    conversion = Conversion.inside(tmp_path, undisturbed.source)
    inside = dict.fromkeys(KILLS, 0)
    with_states = 0
    kept = []

    for stage, cursors in KILLS.items():
        for cursor, delay in zip(cursors, DELAYS, strict=False):
            if stage == "compile":  # shards follow each other fast
                slower = replace(conditions, flush_seconds=2 * FLUSH_SECONDS)
                conversion.kill(stage, cursor=cursor, conditions=slower)
            else:
                conversion.kill(stage, cursor=cursor, conditions=conditions, delay=delay)
            left = conversion.manifest(stage)
            inside[stage] += is_inside(left)
            with_states += left["states"] is not None
            kept.append((stage, conversion.finished(stage)))
    conversion.finish(conditions)

    assert inside == {stage: len(cursors) for stage, cursors in KILLS.items()}
    assert (with_states >= 7) == (conditions is FROM_STATES)  # of 10: an early kill may forestall
    assert conversion.results() == undisturbed.results()
    for stage, files in kept:
        assert files
        assert files.items() <= conversion.finished(stage).items()
    assert leftovers(tmp_path) == []


def test_a_kill_after_every_single_result_ends_in_the_same_bytes(
    undisturbed: Conversion, tmp_path: Path
) -> None:
    conversion = undisturbed.after("allocate", tmp_path)
    kills = 0

    for cursor in range(1, 2 * LAYERS + 1):
        conversion.kill("quantize", cursor=cursor, conditions=REPLAYED)
        kills += is_inside(conversion.manifest("quantize"))
    conversion.finish()

    assert kills == 2 * LAYERS
    assert conversion.results() == undisturbed.results()


def test_a_kill_on_the_way_forward_leaves_no_trace_either(
    undisturbed: Conversion, tmp_path: Path
) -> None:
    """The backward pass begins with a walk forward, which leaves states on disk."""
    conversion = undisturbed.after("tokenize", tmp_path)
    states = 0

    for count in (1, 2, 3):
        conversion.kill_when(
            lambda wanted=count: len(conversion.manifest("sensitivity")["files"]) >= wanted,
            REPLAYED,
        )
        left = conversion.manifest("sensitivity")
        assert left["cursor"] == 0
        states = len(left["files"])
    conversion.finish_stage("sensitivity")

    assert states >= 3
    assert conversion.made_by("sensitivity") == undisturbed.made_by("sensitivity")


@pytest.mark.slow
def test_kills_while_tuning_leave_no_trace_either(undisturbed: Conversion, tmp_path: Path) -> None:
    whole = Conversion.inside(tmp_path / "whole", undisturbed.source, "--quality", "best")
    whole.finish()
    conversion = whole.after("quantize", tmp_path / "killed")
    often = Conditions(flush_seconds=FLUSH_SECONDS, states_seconds=0.5)
    inside = 0

    for step in (10, 90, 200):
        conversion.kill("tune", cursor=step, conditions=often)
        inside += is_inside(conversion.manifest("tune"))
    conversion.finish()

    assert inside == 3
    assert conversion.made_by("tune") == whole.made_by("tune")
    assert conversion.results() == whole.results()


def test_a_second_run_finds_every_stage_and_changes_no_file(undisturbed: Conversion) -> None:
    before = identities(undisturbed.out), identities(undisturbed.work_root)

    ended = undisturbed.finish()

    assert ended.err.splitlines() == [f"{stage} 1/1 cached" for stage in STAGES]
    assert (identities(undisturbed.out), identities(undisturbed.work_root)) == before


@pytest.mark.slow
def test_another_bitrate_measures_nothing_again(undisturbed: Conversion, tmp_path: Path) -> None:
    conversion = undisturbed.after("allocate", tmp_path)
    other = replace(conversion, out=tmp_path / "other", options=("--bpw", "5"))
    shared = ("tokenize", "sensitivity", "measure")
    before = {stage: identities(other.stage(stage)) for stage in shared}

    ended = other.finish()

    cached = [line for line in ended.err.splitlines() if "cached" in line]
    assert cached == [f"{stage} 1/1 cached" for stage in shared]
    assert {stage: identities(other.stage(stage)) for stage in shared} == before
    assert contents(other.out).keys() == contents(undisturbed.out).keys()


@pytest.mark.slow
def test_a_second_process_in_the_same_work_directory_is_refused(
    undisturbed: Conversion, tmp_path: Path
) -> None:
    conversion = undisturbed.after("allocate", tmp_path)
    first = conversion.start(REPLAYED)
    first.until(lambda: conversion.manifest("quantize")["cursor"] >= 1)

    second = conversion.run()
    ended = first.wait()

    assert second.code == 1
    assert f"process {first.pid} is working in" in second.err
    assert "Traceback" not in second.err
    assert ended.code == 0, ended.err
    assert conversion.results() == undisturbed.results()
