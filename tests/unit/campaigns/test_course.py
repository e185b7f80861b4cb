"""Signals of a campaign hit all stages of a command equally often."""

import json
import random
from collections import Counter
from pathlib import Path

from course import Course, drawn
from kills import count
from scenarios import AFTER, BEFORE, BETWEEN, manifests, stamps, under_way
from signals import Case
from state import State

STAGES = ("tokenize", "measure", "quantize", "compile")


def save(work_root: Path, stage: str, status: str, number: int = 0) -> None:
    path = work_root / "model" / stage / f"{number:016}" / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({"stage": stage, "status": status, "files": {}}))


def test_each_stage_is_hit_as_often_as_any_other() -> None:
    rng, hits, commands = random.Random(0), Counter[str](), 2000
    for _ in range(commands):
        left = list(STAGES)
        while stage := drawn(left, rng):  # what comes before a stage that was hit is finished
            hits[stage] += 1
            left = left[left.index(stage) :]

    assert all(0.9 < hits[stage] / commands < 1.1 for stage in STAGES)


def test_a_stage_counts_as_left_until_it_is_finished_as_often_as_undisturbed(
    tmp_path: Path,
) -> None:
    course = Course(
        seconds=dict.fromkeys((BEFORE, "tokenize", "quantize"), 1.0),
        finished=Counter(tokenize=1, quantize=2),  # as in a sweep
    )
    assert course.left(tmp_path) == [BEFORE, "tokenize", "quantize"]

    save(tmp_path, "tokenize", "complete")
    save(tmp_path, "quantize", "cleared", 1)
    save(tmp_path, "quantize", "partial", 2)
    assert course.left(tmp_path) == ["quantize"]

    save(tmp_path, "quantize", "complete", 2)
    assert course.left(tmp_path) == []


def test_a_publication_is_behind_the_last_stage(tmp_path: Path) -> None:
    course = Course(seconds={"compile": 1.0, AFTER: 2.0}, finished=Counter(compile=1))
    save(tmp_path, "compile", "partial")
    assert course.now(tmp_path, {}) == "compile"

    save(tmp_path, "compile", "complete")
    assert course.now(tmp_path, {}) == AFTER
    assert course.left(tmp_path) == [AFTER]


def test_a_resumed_stage_begins_when_its_manifest_is_written_again(tmp_path: Path) -> None:
    save(tmp_path, "quantize", "partial")
    known = stamps(manifests(tmp_path))
    assert under_way(tmp_path) == "quantize"
    assert under_way(tmp_path, known) == BETWEEN

    save(tmp_path, "quantize", "partial", 1)
    assert under_way(tmp_path, known) == "quantize"


def test_a_moment_is_drawn_in_a_stage_that_is_under_way(tmp_path: Path) -> None:
    save(tmp_path, "tokenize", "complete")
    save(tmp_path, "quantize", "partial")
    course = Course(seconds={"tokenize": 1.0, "quantize": 5.0}, finished=Counter(STAGES))
    rng = random.Random(1)
    found = [course.until_drawn(tmp_path, {}, rng, iter([False, True]).__next__) for _ in range(60)]

    moments = [seconds for seconds in found if seconds is not None]
    assert 15 < len(moments) < 45  # the others end undisturbed
    assert min(moments) < 1 < 4 < max(moments) <= 5


def test_an_undisturbed_command_shows_its_stages_and_how_long_they_take(tmp_path: Path) -> None:
    steps = iter(("", "tokenize", "tokenize", "quantize"))

    def has_ended() -> bool:
        stage = next(steps, None)
        for name in ("tokenize", "quantize"):
            if (tmp_path / "model" / name).exists() and stage != name:
                save(tmp_path, name, "complete")
        if stage:
            save(tmp_path, stage, "partial")
        return stage is None

    course = Course.watched(tmp_path, has_ended)

    assert list(course.seconds) == [BEFORE, "tokenize", "quantize"]
    assert course.seconds["tokenize"] > course.seconds["quantize"]
    assert course.finished == {"tokenize": 1, "quantize": 1}


def test_the_table_shows_stages_that_no_signal_has_hit() -> None:
    state = State(program="kills", seed=0)
    case = Case(index=0, scenario="fast", stages=("tokenize", "compile"))
    case.disturbed = [("SIGKILL", "command", "tokenize")]

    count(case, state)

    assert state.second_table("signals in stage").splitlines()[2:] == [
        "| tokenize | 1 | 1 | 1 |",
        "| compile | 0 | 0 | 0 |",
    ]
