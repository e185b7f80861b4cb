"""Files from strangers end in an error of ours or are used: `campaigns/fuzz.py` in short."""

import random
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader import Reader
from readers import READERS

from exl2flow.core.errors import Exl2FlowError

FUZZ = Path(__file__).parents[2] / "campaigns" / "fuzz.py"
# what one file of theirs may end, or what Hypothesis would wait for
APART = {"tokenizer-json", "tokenizer-model", "tekken", "chat-template"}


def test_damaged_files_and_those_of_the_corpus_are_refused_or_used() -> None:
    command = [sys.executable, str(FUZZ), "--reader", "all", "--inputs", "15", "--seed", "0"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(done.stdout.splitlines()) > len(READERS)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    folder = tmp_path_factory.mktemp("strangers")
    found = {name: kind(folder / name) for name, kind in READERS.items() if name not in APART}
    for reader in found.values():
        reader.trial = nullcontext
    return found


@pytest.mark.parametrize("name", [name for name in READERS if name not in APART])
def test_no_simpler_damage_has_another_end(name: str, readers: dict[str, Reader]) -> None:
    reader = readers[name]

    @settings(max_examples=10, deadline=None, database=None, derandomize=True)
    @given(st.randoms(use_true_random=False))
    def damaged(rng: random.Random) -> None:
        with suppress(Exl2FlowError):
            reader.read(reader.damaged(rng))

    damaged()
