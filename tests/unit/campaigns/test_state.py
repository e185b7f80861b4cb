"""A campaign that is killed goes on with its state, and tries what it would have tried."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import state
from checkout import ROOT
from state import State

FOLDER = ROOT / "campaigns"
WORDS = ("fuzz.py", "--reader", "session", "config", "--seed", "3", "--inputs")


def counts(path: Path) -> dict[str, dict[str, Any]]:
    """Return what was tried of each kind, without the time it took."""
    found = json.loads(path.read_bytes())["counts"]
    return {kind: {k: n for k, n in own.items() if k != "seconds"} for kind, own in found.items()}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state of a campaign that was killed in the middle."""
    path = tmp_path_factory.mktemp("state") / "fuzz.json"
    process = subprocess.Popen(
        [sys.executable, *WORDS, "1000000", "--state", str(path)],
        cwd=FOLDER,
        stdout=subprocess.DEVNULL,
    )
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return path


def test_a_killed_campaign_goes_on_and_counts_no_case_twice(killed: Path, tmp_path: Path) -> None:
    went_on, whole = tmp_path / "went_on.json", tmp_path / "whole.json"
    shutil.copy(killed, went_on)
    inputs = max(own["tried"] for own in counts(killed).values()) + 200
    program = "import sys, fuzz; *words, path = sys.argv[1:]\n"
    program += "for sys.argv in ([*words, path], [*words, path.replace('went_on', 'whole')]):\n"
    program += "    assert fuzz.main() == 0"
    command = [sys.executable, "-c", program, *WORDS, str(inputs), "--state", str(went_on)]

    subprocess.run(command, cwd=FOLDER, stdout=subprocess.DEVNULL, timeout=480, check=True)

    assert counts(went_on) == counts(whole)
    assert {own["tried"] for own in counts(whole).values()} == {inputs}


def test_two_runs_do_not_share_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FORK_SECONDS", 0.0)
    path = tmp_path / "state.json"
    words = "from state import State, Path; State.opened('x', path=Path(sys.argv[1]), seed=1)"
    program = f"import sys; {words}; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(
        command, cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        first.stdout.readline()

        with pytest.raises(SystemExit, match="in use by another campaign"):
            State.opened("x", path=path, seed=1)

        first.kill()
    State.opened("x", path=path, seed=1)


def test_the_state_of_another_seed_is_refused(killed: Path) -> None:
    why = "is of another campaign: seed 3 there, 4 here; name another --state"
    with pytest.raises(SystemExit, match=why):
        State.opened("fuzz", path=killed, seed=4)
