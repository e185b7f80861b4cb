"""The demo's held-out text: of the kind that the model was trained on, but other text."""

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "demo"
TRAINED_ON = ("--seed", "1234", "--characters", "5000000")  # as demo/train.py


def written(*options: str) -> str:
    """Return what demo/corpus.py prints."""
    command = [sys.executable, str(DEMO / "corpus.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_held_out_text_is_what_its_command_writes() -> None:
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")

    assert text == written("--seed", "1", "--characters", "80000", "--plain")
    (line,) = (x for x in (DEMO / "README.md").read_text().splitlines() if "> demo/heldout" in x)
    assert "demo/corpus.py --seed 1 --characters 80000 --plain" in line


def test_of_its_long_paragraphs_only_fixed_instructions_were_trained_on() -> None:
    def paragraphs(text: str) -> set[str]:
        return {p for p in text.split("\n\n") if len(p) > 200}

    held_out = paragraphs((DEMO / "heldout.txt").read_text(encoding="utf-8"))

    assert len(held_out) > 100
    shared = held_out & paragraphs(written(*TRAINED_ON))
    assert len(shared) <= len(held_out) // 50
    assert all(text.startswith("First, ") for text in shared)
