"""The tests that `make sanitize` and `make test-cards` name exist."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
LIST = ROOT / "tests/gpu/sanitized.txt"


def test_every_test_of_the_list_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collected as by `make sanitize`, but here: another process would import torch again."""
    collected: list[str] = []

    class Recorder:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            collected.extend(item.nodeid for item in session.items)

    monkeypatch.chdir(ROOT)
    words = ["-q", "--collect-only", "-p", "no:faulthandler", "-m", "gpu", f"@{LIST}"]
    code = pytest.main(words, plugins=[Recorder()])

    assert code == pytest.ExitCode.OK
    assert collected
    assert sorted(collected) == sorted(LIST.read_text().splitlines())


@pytest.mark.parametrize(
    ("card", "variable"),
    [("3090", "EXL2FLOW_TEST_CARD=3090"), ("sm_80", "EXL2FLOW_VIRTUAL_ARCH=80")],
)
def test_every_file_of_a_card_s_tests_exists(card: str, variable: str) -> None:
    command = ["make", "--no-print-directory", "--dry-run", "test-cards", f"CARD={card}", "BIN=bin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    words = done.stdout.split()
    files = [word for word in words if word.startswith("tests/gpu/")]
    assert words[0] == variable
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).is_file()] == []
