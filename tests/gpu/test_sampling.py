"""The sampler chain on a GPU, launched or recorded, draws the same tokens as on a CPU."""

import math

import pytest
import torch

from exl2flow.inference.sampling import SamplerRows, SamplingSettings, sample
from exl2flow.inference.step import Recording

pytestmark = pytest.mark.gpu

FULL = SamplingSettings(temperature=1.2, top_k=0, top_p=0.0)
KINDS = {
    "greedy": (SamplingSettings.greedy(),),
    "default": (SamplingSettings(),),
    "full": (FULL, SamplingSettings(top_k=0, top_p=0.95), SamplingSettings(top_k=0, min_p=0.02)),
    "mixed": (FULL, SamplingSettings.greedy(), SamplingSettings(temperature=2.0, top_k=300)),
}
DRAWS = 20


@pytest.mark.parametrize("vocab", [301, 32_000, 151_936])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_equal_draws_give_equal_tokens(kind: str, batch: int, vocab: int) -> None:
    settings = [KINDS[kind][i % len(KINDS[kind])] for i in range(batch)]
    rows, there = SamplerRows.of(settings), SamplerRows.of(settings, "cuda")
    logits = (torch.randn(batch, vocab) * 3).half().float()  # rounded: many are equal
    logits[:, ::7], logits[:, 1::7], logits[:, 2::11] = 0.0, -0.0, -math.inf
    held, draw = logits.cuda(), torch.zeros(batch, dtype=torch.float64, device="cuda")
    recording = Recording(lambda: sample(held, there, draw))

    for draws in torch.rand(DRAWS, batch, dtype=torch.float64):
        expected = sample(logits, rows, draws).tolist()
        draw.copy_(draws)
        recording.replay()

        assert sample(held, there, draw).tolist() == expected
        assert recording.result.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_that_are_not_finite_are_told(kind: str) -> None:
    settings = [KINDS[kind][i % len(KINDS[kind])] for i in range(4)]
    logits = torch.randn(4, 32_000, device="cuda")
    logits[0, 5], logits[1, 6], logits[2] = -math.nan, math.inf, -math.inf

    draws = torch.full((4,), 0.5, dtype=torch.float64, device="cuda")
    ids = sample(logits, SamplerRows.of(settings, "cuda"), draws).tolist()

    assert ids[:3] == [-1, -1, -1]
    assert 0 <= ids[3] < 32_000
