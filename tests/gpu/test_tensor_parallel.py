"""Models that two processes share on GPUs: their logits are near those of one process."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conversions import small_config
from shared_model import SEEN, SEEN_BY_GPU, results
from stage_runs import run_until
from tiny import make_tiny

from exl2flow.inference import load_model

SCRIPT = Path(__file__).parents[1] / "support" / "shared_model.py"
EXCHANGES = SCRIPT.with_name("peer_exchange.py")
NEAR = 2e-3  # relative error: hidden states are fp16
PATIENCE = 120
QWEN3_MOE = {  # one layer: what a second one chooses may differ where two experts score alike
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "moe_intermediate_size": 64,
}
MODELS: dict[str, dict[str, object]] = {"llama": {}, "qwen2-moe": QWEN3_MOE}


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda:0", marks=pytest.mark.gpu),
        pytest.param("cuda", marks=pytest.mark.multigpu),
    ],
)
@pytest.mark.parametrize("family", MODELS)
def test_two_ranks_say_what_one_process_says(tmp_path: Path, family: str, device: str) -> None:
    source = make_tiny(family, tmp_path / "source", head_dim=64, **MODELS[family])
    config = small_config(source, tmp_path / "models" / "packed", bpw=4.0)
    run_until(config, "compile")
    folder = tmp_path / "models"

    assert statuses(SCRIPT, "2", folder, device) == [0, 0]

    alone = results(load_model(config.out, device="cuda:0"))
    first, second = (torch.load(folder / f"{rank}.pt")["packed"] for rank in range(2))
    for part in ("prompt", "steps"):
        assert torch.equal(first[part], second[part])
    assert first["ids"] == second["ids"]
    assert (first["prompt"] - alone["prompt"]).norm() <= NEAR * alone["prompt"].norm()
    alike = [leading(*pair) for pair in zip(first["ids"], alone["ids"], strict=True)]
    assert min(alike) > SEEN
    texts = [run["steps"].view(len(alike), SEEN_BY_GPU, -1) for run in (first, alone)]
    for count, ours, theirs in zip(alike, *texts, strict=True):
        assert (ours[:count] - theirs[:count]).norm() <= NEAR * theirs[:count].norm()


@pytest.mark.multigpu
def test_rows_that_gpus_exchange_are_those_of_torch(tmp_path: Path) -> None:
    assert statuses(EXCHANGES, tmp_path) == [0, 0]


def statuses(script: Path, *words: object) -> list[int]:
    """Run a script as both ranks, each with its number before the words; return how they end."""
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), *map(str, words)], cwd=script.parent)
        for rank in range(2)
    ]
    try:
        return [process.wait(PATIENCE) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def leading(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens are equal before the first that differs, and that one."""
    same = [a == b for a, b in zip(ids, others, strict=True)]
    return same.index(False) + 1 if False in same else len(same)
