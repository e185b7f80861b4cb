"""Rounds of allocation: what they commit, and that a stopped one judges nothing twice."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conversions import small_config
from resumed import Crash, after, before, crash, interrupt
from stage_runs import calibrated_on, run_until, text_parquet
from tiny import make_tiny
from traces import delete

from exl2flow.core.errors import Interrupted
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.quant.allocate.budget import ALLOCATION_FILE
from exl2flow.quant.allocate.trials import Trials, Verdict

SUBLAYERS = 4
ROUNDS = 2
TOTAL = (ROUNDS + 1) * SUBLAYERS + 1


@pytest.fixture(scope="module")
def allotted(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model whose bits were allotted with a correction after the first trial."""
    root = tmp_path_factory.mktemp("allocate")
    config = small_config(
        make_tiny("llama", root / "model"),
        root / "out",
        bpw=3.0,
        calibration=calibrated_on(text_parquet(root / "text.parquet"), (6, 64), (1, 64)),
        sensitivity={"rows": 2},
        allocate={"rounds": ROUNDS},
    )
    return run_until(config, "allocate")


@pytest.fixture
def unallotted(allotted: Pipeline, tmp_path: Path) -> Pipeline:
    """The same before its bits are allotted."""
    return before(allotted, "allocate", tmp_path)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of allocations in each walk that ended with a verdict."""
    found: list[list[str]] = []
    judge = Trials.judge

    def recording(trials: Trials, choices: dict[str, object], *args: object, **more: object):  # type: ignore[no-untyped-def]  # a spy
        verdict = judge(trials, choices, *args, **more)  # type: ignore[arg-type]  # passed on
        found.append(list(choices))
        return verdict

    monkeypatch.setattr(Trials, "judge", recording)
    return found


def content(pipeline: Pipeline) -> bytes:
    return (pipeline.path("allocate") / ALLOCATION_FILE).read_bytes()


def test_every_sublayer_of_every_trial_is_reported(
    unallotted: Pipeline, judged: list[list[str]]
) -> None:
    ticks: list[Tick] = []

    unallotted.run("allocate", progress=ticks.append)

    walks = len(judged)
    assert walks >= 2
    assert {tick.total for tick in ticks} == {TOTAL}
    done = [tick.done for tick in ticks if tick.detail]
    assert done == [*range(1, walks * SUBLAYERS + 1), TOTAL]
    assert ticks[1].detail == "estimate and uniform model.layers.0.self_attn"


@pytest.mark.parametrize(("act", "error"), [(crash, Crash), (interrupt, Interrupted)])
@pytest.mark.parametrize("done", [2, SUBLAYERS, SUBLAYERS + 2], ids=str)
def test_a_resumed_allocation_is_the_same_and_judges_no_trial_twice(
    done: int,
    act: Callable[[], None],
    error: type[Exception],
    allotted: Pipeline,
    unallotted: Pipeline,
    judged: list[list[str]],
) -> None:
    with pytest.raises(error):
        unallotted.run("allocate", progress=after("allocate", done, act))
    trials = len(judged)

    unallotted.run("allocate", progress=silent)

    assert trials == done // (SUBLAYERS + 1)  # the last sublayer of a walk is before its verdict
    assert content(unallotted) == content(allotted)
    names = [
        entry["name"] for entry in read_json(allotted.path("allocate") / ALLOCATION_FILE)["tried"]
    ]
    assert [name for walk in judged for name in walk] == names


def test_a_signal_ends_the_walk_at_the_next_sublayer(
    unallotted: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def sink(tick: Tick) -> None:
        done.append(tick.done)
        if tick.done == SUBLAYERS + 1:
            interrupt()

    with pytest.raises(Interrupted, match=rf"`allocate` after {SUBLAYERS} of {TOTAL}; everything"):
        unallotted.run("allocate", progress=sink)

    assert done[-1] == SUBLAYERS + 1
    manifest = read_json(unallotted.path("allocate") / "manifest.json")
    assert list(manifest["files"]) == ["trials/0.json"]


def test_a_lost_trial_is_judged_again(
    allotted: Pipeline, unallotted: Pipeline, judged: list[list[str]]
) -> None:
    shutil.copytree(allotted.path("allocate"), unallotted.path("allocate"))
    delete(unallotted.path("allocate") / "trials" / "0.json")

    unallotted.run("allocate", progress=silent)

    assert judged == [["estimate", "uniform"]]
    assert content(unallotted) == content(allotted)


def test_the_trial_with_the_least_divergence_is_taken(allotted: Pipeline) -> None:
    stored = read_json(allotted.path("allocate") / ALLOCATION_FILE)

    trials = [read_json(path) for path in sorted(allotted.path("allocate").glob("trials/*.json"))]

    found = {name: kl for trial in trials for name, kl in Verdict(**trial).divergences.items()}
    assert stored["tried"] == [{"name": name, "kl": kl} for name, kl in found.items()]
    assert all(len(trial["without"]) == SUBLAYERS for trial in trials)
