"""Which devices share a run's work, and what becomes of what followers tell."""

import logging
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from shared_stages import shared
from stage_folders import commit, opened
from toy_conversions import model

from exl2flow.core.errors import ConfigError, StoreError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick
from exl2flow.core.store.crew import places
from exl2flow.core.store.files import digest
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.core.store.store import StageFolder, StageRef, WorkDir
from exl2flow.core.store.told import ToldFolder


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "NVIDIA GeForce RTX 3090")


@pytest.mark.parametrize(
    ("gpus", "device", "expected"),
    [
        (None, "cuda:1", ["cuda:1"]),
        (None, "cpu", ["cpu"]),
        ("1", "cuda", ["cuda:0"]),
        ("2", "cuda", ["cuda:0", "cuda:1"]),
        ("all", "cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        ("2,0", "cuda", ["cuda:2", "cuda:0"]),
        ("2", "cpu", ["cpu", "cpu"]),
    ],
)
@pytest.mark.usefixtures("three_gpus")
def test_gpus_are_given_by_number_or_index(
    gpus: str | None, device: str, expected: list[str]
) -> None:
    assert places(gpus, device) == expected


@pytest.mark.parametrize(
    ("gpus", "device", "words"),
    [
        ("4", "cuda", "needs GPU 3, but torch sees 0, 1, 2"),
        ("0,7", "cuda", "needs GPU 7, but torch sees 0, 1, 2"),
        ("1,1", "cuda", "names a GPU twice"),
        ("all", "cpu", "the run is on the CPU"),
        ("0,1", "cpu", "the run is on the CPU"),
    ],
)
@pytest.mark.usefixtures("three_gpus")
def test_gpus_that_are_not_there_are_refused(gpus: str, device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        places(gpus, device)


@pytest.mark.usefixtures("three_gpus")
def test_gpus_of_two_kinds_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["RTX 3090", "RTX 3090", "RTX 4090"]
    monkeypatch.setattr(torch.cuda, "get_device_name", kinds.__getitem__)

    with pytest.raises(ConfigError, match=r"GPU 1 is a RTX 3090, GPU 2 is a RTX 4090; results"):
        places("all", "cuda")
    assert places("2", "cuda") == ["cuda:0", "cuda:1"]


def test_files_that_were_told_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = StageRef(stage="measure", fingerprint="f" * 64, path="measure/f")
    folder = opened(WorkDir(tmp_path), ref)
    commit(folder, "a", "content")
    commit(folder, "a", "content", counts=True)

    folder.wait_for({"a"})

    assert folder.manifest.cursor == 1
    monkeypatch.setattr("exl2flow.core.store.store.TOLD", 0.01)
    with pytest.raises(StoreError, match="lacks b; repeat the command"):
        folder.wait_for({"a", "b"})


class Told:
    """What a follower tells rank 0."""

    def __init__(self) -> None:
        self.words: list[tuple[str, object]] = []

    def send(self, kind: str, content: object = None) -> None:
        self.words.append((kind, content))


def test_a_follower_tells_what_it_commits_and_writes_no_manifest(tmp_path: Path) -> None:
    ref = StageRef(stage="measure", fingerprint="f" * 64, path="measure/f")
    whole = opened(WorkDir(tmp_path), ref)
    commit(whole, "a", "of rank 0")
    before = (whole.path / "manifest.json").read_bytes()
    told = Told()
    folder = ToldFolder(whole.path, whole.manifest.model_copy(deep=True), told.send)
    tick = Tick(stage="measure", done=1, total=2, detail="b")

    folder.tick(tick)
    commit(folder, "b", "of rank 1", counts=True)
    folder.tick(tick)
    commit(folder, "c", "no step")
    folder.tick(tick)
    folder.note("a note")
    folder.remove(["a"])
    folder.save()

    assert [kind for kind, _ in told.words] == ["commit", "tick", "commit", "note"]
    assert told.words[0] == ("commit", ("b", digest(folder.path / "b"), True))
    assert told.words[2] == ("commit", ("c", digest(folder.path / "c"), False))
    assert folder.valid("a")
    assert folder.valid("b")
    assert (whole.path / "manifest.json").read_bytes() == before


def test_a_stage_goes_on_with_states_in_main_memory_when_a_rank_has_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = model(tmp_path / "model")
    config = ConversionConfig(source=source, out=tmp_path / "out", bpw=4.0, gpus="2", device="cpu")
    dealt = Stage(
        name="shared",
        schema=1,
        inputs=(),
        options=lambda config: {},
        run=shared,
        is_dealt=lambda config: True,
    )
    pipeline, ticks = Pipeline(config, [dealt], device="cpu"), list[Tick]()
    run, runs = ContextVar("run", default="none"), set[str]()

    class Seen(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return runs.add(run.get()) is None

    run.set("this one")
    with pipeline.alone(), caplog.filtering(Seen()):
        pipeline.run("shared", progress=ticks.append)

    folder = StageFolder.load(pipeline.path("shared"))
    assert folder is not None
    assert folder.is_complete()
    assert folder.manifest.files.keys() == {"part-0", "part-1"}
    assert sorted(folder.manifest.notes) == ["of part-0", "of part-1"]
    assert {tick.detail for tick in ticks} == {"part-0", "part-1"}
    assert runs == {"this one"}
    assert "no memory is left on `cpu` for rank 1" in caplog.text
    assert "states move to main memory" in caplog.text
    assert [r.name for r in caplog.records if "a warning of part-1" in r.message] == [
        "shared_stages"
    ]
