"""A small part of each campaign of `campaigns/`, as a program of its own."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from leaks import Search
from scenarios import repeated
from state import bound

CAMPAIGNS = Path(__file__).parents[2] / "campaigns"
TOKEN = "hf_kept"


PREFECT = ("--targets", "flow", "worker", "server")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("kills.py", "--kills", "6"),
        ("kills.py", "--kills", "6", "--scenario", "fast", *PREFECT),
        ("leaks.py", "--failures", "6", "--flows", "2"),
        ("soak.py", "--seconds", "20", "--without", "swap"),
        ("restarts.py", "--restarts", "6"),
    ],
)
def test_a_short_campaign_finds_nothing(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(CAMPAIGNS / words[0]), *words[1:]], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "| tried | failed |" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_campaigns_find_nothing_with_a_seed_of_today(tmp_path: Path) -> None:
    """Each run of the slow tests tries other cases; the table names the seed."""
    seed = str(time.time_ns() // 10**9 % 10**6)
    words = ("--seconds", "600", "--seed", seed, "--states", str(tmp_path))

    done = subprocess.run(
        [sys.executable, str(CAMPAIGNS / "campaign.py"), *words], capture_output=True, text=True
    )

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}" in done.stdout


@pytest.mark.parametrize("spelled", [TOKEN, "c29tZTpoZl9rZXB0", "dG9rZW46aGZfa2VwdA=="])
def test_a_secret_is_found_however_it_is_written(spelled: str) -> None:
    search = Search({"token": TOKEN})

    search.look("file", f"before{spelled}after".encode(), "here")
    search.look("file", b"hf_another", "there")

    assert search.places == ["token in here"]


def test_a_sublayer_that_was_done_twice_is_counted() -> None:
    first = "quantize 1/3 model.layers.0.self_attn bpw=4.4\nquantize 2/3 model.layers.0.mlp bpw=4.4"
    second = "quantize 1/3\nquantize 2/3 model.layers.0.mlp bpw=4.4\nmeasure 1/3 lm_head"

    assert repeated(first) == []
    assert repeated(f"{first}\n{second}") == ["quantize model.layers.0.mlp"]


def test_a_sublayer_that_a_worker_did_twice_is_counted() -> None:
    line = "12:00:00.1 | INFO    | exl2flow.quant.walk.walk - model.layers.0.mlp"
    both = f"{line} nats=1e-07..0.005 elapsed=0.3s\n{line} bpw=3.794 rel_err=0.0707"

    assert repeated(both) == []
    assert repeated(f"{both}\n{line} bpw=3.8") == ["quant.walk.walk model.layers.0.mlp bpw"]


def test_no_failure_in_300_trials_excludes_one_per_cent() -> None:
    assert bound(300) == pytest.approx(3 / 300, rel=0.01)
