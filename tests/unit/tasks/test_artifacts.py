import logging
import threading
from contextlib import closing, suppress

import pytest

from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.core.runtime.progress import Tick, report, reporting_to
from exl2flow.tasks import artifacts
from exl2flow.tasks.artifacts import Artifacts, ProgressArtifact, run_artifact


class Recorder:
    """Stands in for Prefect's artifact calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.percents: list[float] = []
        self.descriptions: list[str] = []
        monkeypatch.setattr(artifacts, "create_progress_artifact", self.create)
        monkeypatch.setattr(artifacts, "update_progress_artifact", self.update)

    def create(self, percent: float, **values: object) -> str:
        self.percents.append(percent)
        self.descriptions.append(str(values["description"]))
        return "id"

    def update(self, artifact: str, percent: float, **values: object) -> None:
        assert artifact == "id"
        self.percents.append(percent)
        self.descriptions.append(str(values["description"]))


def ticks(total: int) -> list[Tick]:
    return [Tick(stage="measure", done=done, total=total) for done in range(total + 1)]


@pytest.mark.parametrize(
    ("model", "key"),
    [("tiny", "tiny-errors"), ("Llama-3.2_1B", "llama-3-2-1b-errors"), ("日本", "model-errors")],
)
def test_key_holds_what_prefect_allows(model: str, key: str) -> None:
    assert Artifacts(model).key("errors") == key


def test_failing_calls_are_reported_once_and_pause_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("away")

    published = Artifacts("tiny")
    with caplog.at_level(logging.WARNING):
        results = [published.attempt(fail) for _ in range(3)]
        monkeypatch.setattr(artifacts, "PAUSE_SECONDS", 0.0)
        published = Artifacts("tiny")
        results += [published.attempt(fail) for _ in range(3)]

    assert results == [None] * 6
    assert len(calls) == 1 + 3
    assert len(caplog.records) == 2


def test_first_and_last_tick_are_published_and_all_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    received: list[Tick] = []

    bar = ProgressArtifact(Artifacts("tiny"), "measure")
    with reporting_to(received.append), closing(bar) as progress:
        for tick in ticks(10):
            progress(tick)

    assert recorder.percents == [0.0, 100.0]
    assert received == ticks(10)


def moved(progress: ProgressArtifact) -> None:
    """Wait until the bar shows the last tick."""
    assert progress.bar.moving is not None
    progress.bar.moving.result()


def test_work_goes_on_while_a_slow_server_moves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    answers = threading.Event()
    monkeypatch.setattr(artifacts, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(
        artifacts,
        "create_progress_artifact",
        lambda *a, **v: answers.wait() and recorder.create(*a, **v),
    )

    with closing(ProgressArtifact(Artifacts("tiny"), "measure")) as progress:
        for tick in ticks(4):
            progress(tick)
        waited = recorder.percents.copy()
        answers.set()

    assert waited == []
    assert recorder.percents == [0.0, 100.0]


def test_every_tick_is_published_when_they_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(artifacts, "UPDATE_SECONDS", 0.0)

    with closing(ProgressArtifact(Artifacts("tiny"), "measure")) as progress:
        for tick in ticks(4):
            progress(tick)
            moved(progress)

    assert recorder.percents == [0.0, 25.0, 50.0, 75.0, 100.0]


def test_single_step_has_no_progress_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)

    ProgressArtifact(Artifacts("tiny"), "allocate")(Tick(stage="allocate", done=1, total=1))

    assert recorder.percents == []


def test_progress_of_a_resumed_stage_shows_the_pace_of_this_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    now = [1000.0]
    monkeypatch.setattr(artifacts.time, "monotonic", lambda: now[0])

    with closing(ProgressArtifact(Artifacts("tiny"), "measure")) as progress:
        for done in (6, 7, 10):  # six were found done
            progress(Tick(stage="measure", done=done, total=10, detail=f"sublayer {done}"))
            moved(progress)
            now[0] += 60

    first, second, last = recorder.descriptions
    assert first == "6 of 10 · last: sublayer 6"
    assert second.startswith("7 of 10 · remaining 0:03:00 · elapsed 0:01:00 · ends about ")
    assert second.endswith(" UTC · last: sublayer 7")
    assert last == "10 of 10 · elapsed 0:02:00"


def published_words(recorder: Recorder, *, end: BaseException | None = None) -> list[str]:
    """Return the words of a run's artifact: the first ones, those at work and the last ones."""
    with suppress(BaseException), run_artifact("tiny", "`out`") as watcher:
        watcher.expect(["measure", "allocate"])
        with reporting_to(watcher):
            report(Tick(stage="measure", done=1, total=4))
        if end is not None:
            raise end
        watcher.finish("`out`: 1 MB")
    return recorder.descriptions


@pytest.mark.parametrize(
    ("end", "words", "percent"),
    [
        (None, "done: `out`: 1 MB", 100.0),
        (Exl2FlowError("no room"), "failed: no room", 12.5),
        (ValueError("defect"), "failed: unexpected ValueError: defect", 12.5),
        (Interrupted("stopped", signum=2), "cancelled: stopped", 12.5),
        (KeyboardInterrupt(), "cancelled", 12.5),
    ],
)
def test_artifact_of_a_run_begins_before_its_stages_and_ends_with_how_it_ended(
    end: BaseException | None, words: str, percent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)

    first, stages, *_, last = published_words(recorder, end=end)

    assert first == "checks before work · output `out`"
    assert stages == "stage 1 of 2 begins · output `out`"
    assert last == f"{words} · output `out`"
    assert recorder.percents[-1] == percent


def test_artifact_of_a_run_is_updated_at_most_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)

    with run_artifact("tiny", "`out`"):
        for tick in ticks(1000):
            report(tick)

    assert len(recorder.descriptions) == 2  # the first and the last


def test_progress_of_another_stage_has_a_pace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)

    with closing(ProgressArtifact(Artifacts("tiny"), "publish")) as progress:
        for stage in ("upload", "verify"):
            progress(Tick(stage=stage, done=2, total=2))

    assert recorder.descriptions == ["2 of 2", "2 of 2"]
