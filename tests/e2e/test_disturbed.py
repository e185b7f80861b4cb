"""Whole commands after power cuts, and with faults of files, memory and the Hub.

`campaigns/` tries many more.
"""

import time
from pathlib import Path

import pytest
from crashes import campaign
from faults import Campaign

STAGES = ("sensitivity", "quantize", "compile")  # disturbed in every test run
SLOW_FAULTS = 12


@pytest.mark.slow
def test_stages_with_a_fault_can_be_repeated(tmp_path: Path) -> None:
    work = Campaign(among=STAGES, most={"files": 3, "memory": 1})

    counts = work.run(tmp_path, ["files", "memory"])

    assert [text for count in counts.values() for text in count.failures] == []
    assert sum(count.faults for count in counts.values()) == 4 * len(STAGES)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("composed", 4),
        *(
            pytest.param(name, 60, marks=pytest.mark.slow)
            for name in ("best", "composed", "refine", "sweep", "publish")
        ),
    ],
)
def test_commands_survive_power_cuts(name: str, states: int, tmp_path: Path) -> None:
    counts = campaign([name], tmp_path, states=states, seconds=600, seed=1)

    assert counts[name].failures == []
    assert counts[name].same >= states


@pytest.mark.slow
def test_a_publication_with_a_fault_can_be_repeated(tmp_path: Path) -> None:
    counts = Campaign(most={"hub": 8}).run(tmp_path, ["hub"])

    assert [text for count in counts.values() for text in count.failures] == []
    assert sum(count.faults for count in counts.values()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["files", "memory", "hub"])
def test_commands_with_faults_can_be_repeated(kind: str, tmp_path: Path) -> None:
    work = Campaign(seed=1, most={kind: SLOW_FAULTS}, deadline=time.monotonic() + 600)

    counts = work.run(tmp_path, [kind])

    assert [text for count in counts.values() for text in count.failures] == []
    assert sum(count.faults for count in counts.values()) >= SLOW_FAULTS
