"""A campaign that is killed goes on with its state, and tries what it would have tried."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

PROGRAM = (sys.executable, str(ROOT / "campaigns" / "fuzz.py"), "--reader", "session", "config")


def run(state: Path, *words: str, inputs: int = 1) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, "--inputs", str(inputs), "--state", str(state), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def counts(state: Path) -> dict[str, dict[str, Any]]:
    """Return what was tried of each kind, without the time it took."""
    found = json.loads(state.read_bytes())["counts"]
    return {kind: {k: n for k, n in own.items() if k != "seconds"} for kind, own in found.items()}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state of a campaign that was killed in the middle."""
    state = tmp_path_factory.mktemp("state") / "fuzz.json"
    process = subprocess.Popen(
        [*PROGRAM, "--inputs", "1000000", "--state", str(state), "--seed", "3"],
        stdout=subprocess.DEVNULL,
    )
    while not state.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return state


def test_a_killed_campaign_goes_on_and_counts_no_case_twice(killed: Path, tmp_path: Path) -> None:
    inputs = max(own["tried"] for own in counts(killed).values()) + 200
    assert run(tmp_path / "whole.json", "--seed", "3", inputs=inputs).returncode == 0

    done = run(killed, "--seed", "3", inputs=inputs)

    assert done.returncode == 0, done.stderr
    assert counts(killed) == counts(tmp_path / "whole.json")
    assert {own["tried"] for own in counts(killed).values()} == {inputs}


def test_two_runs_do_not_share_a_state(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    words = "from state import State, Path; State.opened('x', path=Path(sys.argv[1]), seed=1)"
    program = f"import sys; {words}; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(path)]
    folder = ROOT / "campaigns"
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()

        second = subprocess.run(command, cwd=folder, input="", capture_output=True, text=True)

        first.kill()
    assert second.returncode == 1
    assert "in use by another campaign" in second.stderr
    assert subprocess.run(command, cwd=folder, input="", text=True).returncode == 0


def test_the_state_of_another_seed_is_refused(killed: Path) -> None:
    before = killed.read_bytes()

    done = run(killed, "--seed", "4")

    assert done.returncode == 1
    assert "is of another campaign: seed 3 there, 4 here; name another --state" in done.stderr
    assert killed.read_bytes() == before
