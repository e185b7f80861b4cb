"""The flow `sweep` against a real server: what is shared, failures, runners, a dead worker."""

import json
import os
import re
import shutil
import signal
import sys
import threading
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conversions import small_options, snapshot, weights
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect_runs import Swept, artifacts, log_lines, run_name, run_state, settled, task_states
from servers import wait_for

from exl2flow.core.errors import ConfigError, Interrupted, SweepFailed
from exl2flow.core.options.sweep import REPORT_PAGE, SWEEP_FILE, SweepConfig
from exl2flow.core.runtime.progress import Tick, reporting_to
from exl2flow.flows import sweep, sweep_locally
from exl2flow.inference.report.page import write_up

SHARED = ("tokenize", "sensitivity", "measure")
OWN = ("allocate", "quantize", "compile", "validate")
BITRATES = ("3.0bpw", "4.0bpw", "6.0bpw")


def config_of(source: Path, root: Path, **values: object) -> SweepConfig:
    options = {**small_options(), "bpw": (6, 3, 4), **values}
    return SweepConfig.model_validate({"source": source, "out": root / "out", **options})


def run_flow(config: SweepConfig) -> tuple[UUID, Any]:
    state = sweep(config, return_state=True)
    run = state.state_details.flow_run_id
    assert run is not None
    return run, state


def states_of(shared: str, bitrates: str, own: str) -> dict[str, str]:
    """Return the expected states of all tasks of a sweep."""
    stages = {f"{name} {stage}": own for name in BITRATES for stage in OWN}
    return dict.fromkeys(SHARED, shared) | dict.fromkeys(BITRATES, bitrates) | stages


def task_times(run: UUID) -> dict[str, tuple[datetime, datetime]]:
    """Return task name → (start, end) of those that were completed, or cached."""
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    expected = states_of("", "", "").keys()

    def read() -> dict[str, tuple[datetime, datetime]]:
        with get_client(sync_client=True) as client:
            tasks = client.read_task_runs(flow_run_filter=chosen)
        done = [task for task in tasks if task.state and task.state.is_completed()]
        times = {task.name: (task.start_time, task.end_time) for task in done}
        return {name: (a, b) for name, (a, b) in times.items() if a and b}

    found: dict[str, tuple[datetime, datetime]] = settled(read, lambda t: t.keys() >= expected)
    assert found.keys() == expected
    return found


@pytest.fixture
def source(swept: Swept) -> Path:
    return swept.config.source


@pytest.fixture
def threads_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers compute as this process does; the number of threads changes roundings."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_run_measures_once_and_has_a_task_per_bitrate_and_stage(swept: Swept) -> None:
    assert run_name(swept.run) == "tiny@3,4,6bpw"
    assert task_states(swept.run) == states_of("Completed", "Completed", "Completed")
    assert sorted(weights(swept.config.out)) == list(BITRATES)


def test_run_shows_all_bitrates_in_one_table_and_one_plot(swept: Swept) -> None:
    found = artifacts(swept.run)

    rows = json.loads(str(found["tiny-bitrates"].data))
    assert [row["model"] for row in rows] == list(BITRATES)
    divergences = [float(row["KL divergence"]) for row in rows]
    assert divergences == sorted(divergences, reverse=True)
    page = str(found["tiny-comparison"].data)
    assert "data:image/svg+xml;base64," in page
    assert {f"tiny-{n.replace('.', '-')}-bit-allocation" for n in BITRATES} <= found.keys()


def test_folder_tells_what_every_bitrate_came_to(swept: Swept) -> None:
    content = json.loads((swept.config.out / SWEEP_FILE).read_bytes())

    assert list(content["bitrates"]) == list(BITRATES)
    for name, found in content["bitrates"].items():
        assert found["error"] is None
        assert found["bpw"] == float(name.removesuffix("bpw"))
        assert found["score"]["kl_divergence"] > 0


def test_folder_has_a_page_that_needs_no_network(swept: Swept) -> None:
    page = (swept.config.out / REPORT_PAGE).read_text(encoding="utf-8")

    assert page == write_up(swept.config.out)
    assert all(f"<b>{name}</b>" in page for name in BITRATES)  # its sample
    assert page.count("<svg") == 1 + len(BITRATES)
    assert "calibration digest" in page
    assert not re.search(r"<script|<link|src=|@import", page)
    [work] = swept.config.work_dir_root.glob("tiny-*")
    of_work = write_up(work)
    assert all(f"<b>{name}</b>" in of_work for name in BITRATES)


@pytest.mark.slow  # `test_prefect_convert.py` repeats a conversion
def test_second_run_is_cached_throughout_and_changes_no_model(swept: Swept) -> None:
    folders = [swept.config.out / name for name in BITRATES] + [swept.config.work_dir_root]
    before = [snapshot(folder) for folder in folders]

    run, _ = run_flow(swept.config)

    assert task_states(run) == states_of("Cached", "Completed", "Cached")
    assert [snapshot(folder) for folder in folders] == before


@pytest.mark.slow
def test_only_what_is_missing_is_made_again(swept: Swept) -> None:
    before = weights(swept.config.out)
    shutil.rmtree(swept.config.out / "4.0bpw")

    run, _ = run_flow(swept.config)

    again = {"4.0bpw compile": "Completed", "4.0bpw validate": "Completed"}
    assert task_states(run) == states_of("Cached", "Completed", "Cached") | again
    assert weights(swept.config.out) == before


@pytest.mark.slow
def test_failed_bitrates_do_not_stop_the_others(swept: Swept) -> None:
    strict = swept.config.validate_options.model_copy(update={"fail_perplexity_ratio": 1.01})
    config = swept.config.model_copy(update={"validate_options": strict})

    run, state = run_flow(config)

    with pytest.raises(SweepFailed) as caught:
        state.result()
    failed, states = str(caught.value), task_states(run)
    names = [name for name in BITRATES if states[name] == "Failed"]
    assert 0 < len(names) < len(BITRATES)
    assert [line for line in failed.splitlines() if "above 1.01 x" in line and "`" in line]
    assert all(f"`{name}`: perplexity" in failed for name in names)
    validated = {name: states[f"{name} validate"] for name in BITRATES}
    assert validated == dict.fromkeys(BITRATES, "Completed")
    content = json.loads((config.out / SWEEP_FILE).read_bytes())
    assert [n for n, found in content["bitrates"].items() if found["error"]] == names
    assert "tiny-comparison" in artifacts(run)


@pytest.mark.slow
def test_same_stages_without_prefect_give_the_same_bytes(
    swept: Swept, source: Path, tmp_path: Path
) -> None:
    made = sweep_locally(config_of(source, tmp_path))

    assert weights(made.out) == weights(swept.config.out)
    assert [Path(score.model).name for score in made.scores] == list(BITRATES)


@pytest.mark.slow  # `test_prefect_convert.py` interrupts a conversion
def test_interrupted_sweep_stops_after_a_sublayer_and_goes_on(
    swept: Swept, source: Path, tmp_path: Path
) -> None:
    config = config_of(source, tmp_path)

    def interrupt(tick: Tick) -> None:
        if tick.stage == "4.0bpw quantize" and tick.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with reporting_to(interrupt):
        run, state = run_flow(config)

    with pytest.raises(Interrupted):
        state.result()
    assert run_state(run) == "Cancelled"
    assert sorted(weights(config.out)) == ["3.0bpw"]
    run, state = run_flow(config)
    assert state.is_completed()
    assert task_states(run)["3.0bpw quantize"] == "Cached"
    assert weights(config.out) == weights(swept.config.out)


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "kills"), [("dask", 0), ("processes", 1)])
def test_each_slot_makes_one_bitrate_at_a_time_with_the_same_bytes_also_after_a_kill(
    swept: Swept, source: Path, tmp_path: Path, runner: str, kills: int, threads_of_workers: None
) -> None:
    if runner == "dask":
        pytest.importorskip("prefect_dask", reason="comes with the extra `dask`")
    config = config_of(source, tmp_path, runner=runner, workers=2)
    killed: list[int] = []
    killer = threading.Thread(
        target=lambda: killed.extend(kill_a_quantizer(config.work_dir_root) for _ in range(kills))
    )
    killer.start()

    run, state = run_flow(config)

    killer.join()
    assert len(killed) == kills
    assert state.is_completed(), state
    assert run_state(run) == "Completed"
    times = task_times(run)
    lines = "\n".join(log.message for log in log_lines(run))
    slots = dict(re.findall(r"bitrate=(\S+) slot=(\d)", lines))
    assert sorted(slots) == list(BITRATES)
    assert set(slots.values()) <= {"0", "1"}
    for slot in "01":
        mine = sorted(times[name] for name in BITRATES if slots[name] == slot)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
    assert weights(config.out) == weights(swept.config.out)


def kill_a_quantizer(work_root: Path) -> int:
    """Kill one of two processes that quantize at the same time, return its id.

    The pool then ends the other one, which commits its sublayer first.
    """
    found: set[Path] = set()

    def are_there() -> bool:
        sublayers = work_root.glob("*/quantize/*/sublayers/*.safetensors")
        found.update(path.parents[1] for path in sublayers)
        return len(found) == 2

    wait_for(are_there, pause=0.01)
    folder = found.pop()
    pid = int((folder.parents[1] / "locks" / f"quantize-{folder.name}").read_text())
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.slow
def test_ray_gives_the_same_bytes(
    swept: Swept,
    source: Path,
    tmp_path: Path,
    threads_of_workers: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("prefect_ray", reason="comes with the extra `ray`")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the user's home
    config = config_of(source, tmp_path, runner="ray", workers=2)

    run, state = run_flow(config)

    assert state.is_completed(), state
    assert task_states(run) == states_of("Completed", "Completed", "Completed")
    assert weights(config.out) == weights(swept.config.out)


def test_run_fails_at_once_when_its_runner_is_not_installed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prefect_dask", None)  # as if it were not installed
    config = config_of(source, tmp_path, runner="dask")

    run, state = run_flow(config)

    assert run_state(run) == "Failed"
    with pytest.raises(ConfigError, match="the runner `dask` is not installed"):
        state.result()
    assert not config.work_dir_root.exists()
