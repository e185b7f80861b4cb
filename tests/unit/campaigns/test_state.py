"""A campaign that is killed goes on with its state, and tries what it would have tried."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import state
from checkout import ROOT
from state import State

FOLDER = ROOT / "campaigns"
WORDS = ("fuzz.py", "--reader", "session", "config", "--seed", "3", "--inputs")
FORKS = """
import json, os, sys
import fuzz
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for line in sys.stdin:
    sys.argv = json.loads(line)
    if not (pid := os.fork()):
        os._exit(fuzz.main())
    os.write(out, f"{pid}\\n".encode())
    os.write(out, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\\n".encode())
"""


def counts(path: Path) -> dict[str, dict[str, Any]]:
    """Return what was tried of each kind, without the time it took."""
    found = json.loads(path.read_bytes())["counts"]
    return {kind: {k: n for k, n in own.items() if k != "seconds"} for kind, own in found.items()}


@pytest.fixture(scope="module")
def campaign() -> Iterator[subprocess.Popen]:
    """A process that has imported the campaign, and runs it in forks."""
    command = [sys.executable, "-c", FORKS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=FOLDER, **pipes) as process:
        yield process
        process.stdin.close()


def begun(campaign: subprocess.Popen, inputs: int, path: Path) -> int:
    """Start it with a state; return its process id."""
    campaign.stdin.write(f"{json.dumps([*WORDS, str(inputs), '--state', str(path)])}\n")
    campaign.stdin.flush()
    return int(campaign.stdout.readline())


def code(campaign: subprocess.Popen) -> int:
    """Return how it ended."""
    return int(campaign.stdout.readline())


@pytest.fixture(scope="module")
def killed(campaign: subprocess.Popen, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state of a campaign that was killed in the middle."""
    path = tmp_path_factory.mktemp("state") / "fuzz.json"
    pid = begun(campaign, 1000000, path)
    while not path.exists():
        assert Path(f"/proc/{pid}/cmdline").exists()
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert code(campaign) == -signal.SIGKILL
    return path


def test_a_killed_campaign_goes_on_and_counts_no_case_twice(
    campaign: subprocess.Popen, killed: Path, tmp_path: Path
) -> None:
    went_on, whole = tmp_path / "went_on.json", tmp_path / "whole.json"
    shutil.copy(killed, went_on)
    inputs = max(own["tried"] for own in counts(killed).values()) + 200

    for path in (went_on, whole):
        begun(campaign, inputs, path)
        assert code(campaign) == 0

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
