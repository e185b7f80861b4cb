"""What was committed survives every power cut, and the tests would notice if it did not."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from commands import Command, Opened, quietly
from crashes import EXHAUSTED, MEMORY, Count, Part, Trial
from file_layer import SYNC
from power_cuts import Cut, Recording, Tear, content_times, lay_out
from state import State

from exl2flow.core.store import files
from exl2flow.core.store.files import digest, write_text
from exl2flow.core.store.store import StageFolder, WorkDir

SAMPLED = 20
FINGERPRINT = "0123456789abcdef" * 4


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder that no disk waits for, if there is one."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def stage(memory: Path) -> Command:
    """A stage that makes a file in a folder, unless it is there, saves states, and is complete."""
    disk = memory / "disk"
    disk.mkdir()
    work = WorkDir(disk / "work")
    ref = work.ref("measure", FINGERPRINT)

    def run() -> None:
        if work.is_complete(ref):
            return
        folder = work.open(ref, schema=1, inputs={}, options={}, device="cpu")
        if not folder.valid("results/a"):
            write_text(folder.path / "results" / "a", "x" * 1500)
            folder.commit("results/a", digest(folder.path / "results" / "a"), cursor=1)
            folder.save_states(torch.zeros(2), 1)
        folder.complete()

    return Command(disk=disk, run=run)


def exhaust(command: Command, count: Count, deadline: float) -> None:
    """Try all states of a command."""
    state, numbers = State(program="crashes", seed=0), range(sys.maxsize)
    part = Part(name=EXHAUSTED, seed=0, numbers=numbers, deadline=deadline, state=state)
    part.run(command, count)


def failures(command: Command) -> list[str]:
    count = Count()
    exhaust(command, count, float("inf"))
    assert not count.is_cut
    assert count.resumed > 20
    return count.failures


def is_noticed(command: Command, text: str) -> bool:
    """Return whether a state fails with this text; try no others after it."""
    trial = Trial(command)
    problems = (trial.attempt(cut, None, Count()) for cut in trial.recording.every())
    return any(text in problem for problem in problems if problem)


def test_every_state_of_a_stage_ends_in_the_same_bytes(stage: Command) -> None:
    assert failures(stage) == []


def test_running_out_of_time_is_not_a_failure(stage: Command) -> None:
    count = Count()

    exhaust(stage, count, float("-inf"))

    assert (count.is_cut, count.drawn, count.failures) == (True, 0, [])


def without(kept: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flushes of some paths do nothing."""
    after = Recording.after

    def forgetful(recording: Recording, kind: str, path: str, **details: object) -> None:
        if kind != SYNC or kept(path):
            after(recording, kind, path, **details)

    monkeypatch.setattr(Recording, "after", forgetful)


@pytest.mark.parametrize("beginning", [".a.", "results"], ids=["file", "folder"])
def test_what_is_not_flushed_is_noticed(
    beginning: str, stage: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(lambda path: not Path(path).name.startswith(beginning), monkeypatch)

    assert is_noticed(stage, "results/a` ")


def test_new_folders_whose_parents_are_not_flushed_are_noticed(
    stage: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        files, "make_folder", lambda folder: folder.mkdir(parents=True, exist_ok=True)
    )

    assert is_noticed(stage, "lost")


def test_toy_conversions_end_in_the_same_bytes(memory: Path) -> None:
    with quietly():
        trial = Trial(Opened(memory).command("toy"))
        draw, count = random.Random(0), Count()
        problems = [trial.attempt(trial.recording.drawn(draw), draw, count) for _ in range(SAMPLED)]

    assert [problem for problem in problems if problem] == []
    assert count.same >= SAMPLED


@pytest.mark.slow
def test_every_state_of_a_toy_conversion_ends_in_the_same_bytes(memory: Path) -> None:
    with quietly():
        command = Opened(memory).command("toy")
        assert failures(command) == []


def test_recording_leads_from_the_beginning_to_the_end(stage: Command) -> None:
    (stage.disk / "before").write_text("there already")
    recording = Recording(stage.disk)
    with recording.watching():
        stage.run()
        (stage.disk / "before").rename(stage.disk / "work" / "moved")
        with (stage.disk / "work" / "moved").open("ab") as file:
            file.write(b" and more")
    wanted = stage.results()

    every = range(len(recording.events))
    lay_out(recording.left(Cut(prefix=len(every), kept=frozenset(every))), stage.disk)

    assert stage.results() == wanted
    assert (stage.disk / "work" / "moved").read_text() == "there already and more"
    with content_times():
        assert StageFolder.load(stage.disk / "work" / "measure" / FINGERPRINT[:16]) is not None


@pytest.mark.parametrize(
    ("tear", "left"),
    [
        (Tear(sector=512, mask=0, is_sized=False), b""),
        (Tear(sector=512, mask=0, is_sized=True), bytes(1000)),
        (Tear(sector=512, mask=1, is_sized=False), b"x" * 512),
        (Tear(sector=512, mask=2, is_sized=False), bytes(512) + b"x" * 488),
        (Tear(sector=4096, mask=1, is_sized=False), b"x" * 1000),
    ],
)
def test_torn_write_leaves_some_sectors(tear: Tear, left: bytes, tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    with recording.watching():
        (tmp_path / "a").write_bytes(b"x" * 1000)

    tree = recording.left(Cut(prefix=2, kept=frozenset({0, 1}), torn={1: tear}))

    found = tree["a"]
    assert found is not None
    assert found[0] == left
