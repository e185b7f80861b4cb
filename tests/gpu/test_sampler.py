"""The sampler on a GPU, launched or recorded, draws the same tokens as on a CPU."""

import math
import random
from dataclasses import replace

import pytest
import torch
from pairs import pairs_of
from sampled import PLAIN, slots_of

from exl2flow.engine.sampling import Kind, SamplerSlots, SamplingSettings, sample
from exl2flow.kernels.cuda.graphs import CudaGraph

pytestmark = pytest.mark.gpu

EVERY = SamplingSettings(
    dry_breakers=(1,),
    xtc_ignored=(5,),
    temperature=1.2,
    temperature_last=True,
    smoothing_factor=0.1,
    top_p=0.98,
    top_a=0.001,
    min_p=0.001,
    tfs=0.99,
    typical=0.95,
    skew=0.1,
    repetition_penalty=1.1,
    repetition_range=30,
    repetition_decay=20,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    mirostat=True,
    mirostat_tau=4.0,
    token_bias=((2, 0.5), (3, -math.inf)),
    cfg_scale=1.3,
    dry_multiplier=0.8,
    dry_allowed_length=1,
    xtc_probability=0.4,
    xtc_threshold=0.02,
)
FULL = replace(PLAIN, temperature=1.2)
KINDS = {
    "greedy": (SamplingSettings.greedy(),),
    "default": (SamplingSettings(),),
    "full": (FULL, replace(PLAIN, top_p=0.95), replace(PLAIN, min_p=0.02)),
    "mixed": (FULL, SamplingSettings.greedy(), SamplingSettings(temperature=2.0, top_k=300)),
    "every": (EVERY,),
    "every full": (EVERY, replace(EVERY, top_k=0), FULL),
}
DRAWS = 5


def entered(kind: str, batch: int, vocab: int, device: str) -> SamplerSlots:
    """Return slots with equal histories on every device, the first two of them paired."""
    rng = random.Random(batch)
    settings = [KINDS[kind][i % len(KINDS[kind])] for i in range(batch)]
    histories = [[rng.randrange(9) for _ in range(rng.randrange(100))] for _ in range(batch)]
    slots = slots_of(settings, vocab, histories=histories, device=device, room=128)
    words = torch.full((-(-vocab // 32),), -1, dtype=torch.int32)
    words[1::3] = 0
    slots.allow({batch - 1: words})
    if batch > 1 and settings[0].cfg_scale is not None:
        slots.pair(0, 1)
    return slots


@pytest.mark.parametrize(
    ("kind", "batch", "vocab"), pairs_of([*KINDS], [1, 3, 16], [301, 32_000, 151_936])
)
@torch.inference_mode()
def test_equal_draws_give_equal_tokens(kind: str, batch: int, vocab: int) -> None:
    operations = Kind.of(KINDS[kind], masked=True, top=5, probabilities=True)
    here, launched, replayed = (
        entered(kind, batch, vocab, device) for device in ("cpu", "cuda", "cuda")
    )
    logits = (torch.randn(batch, vocab) * 3).half().float()  # rounded: many are equal
    logits[:, ::7], logits[:, 1::7], logits[:, 2::11] = 0.0, -0.0, -math.inf
    held, draw = logits.cuda(), torch.zeros(batch, dtype=torch.float64, device="cuda")
    sample(held, replayed, draw, operations)  # takes memory for masks
    before = [each.clone() for each in entered(kind, batch, vocab, "cuda").tensors()]
    recording = CudaGraph(lambda: sample(held, replayed, draw, operations).ids)
    for kept, fresh in zip(replayed.tensors(), before, strict=False):
        kept.copy_(fresh)  # warming up samples, too

    for draws in torch.rand(DRAWS, batch, dtype=torch.float64):
        expected = sample(logits, here, draws, operations)
        draw.copy_(draws)
        recording.replay()
        found = sample(held, launched, draw, operations)

        assert found.ids.tolist() == expected.ids.tolist()
        assert recording.result.tolist() == expected.ids.tolist()
        torch.testing.assert_close(
            found.probabilities.cpu(), expected.probabilities, rtol=1e-6, atol=0
        )
    for here_it_is, there in zip(here.tensors(), replayed.tensors(), strict=True):
        torch.testing.assert_close(there.cpu(), here_it_is, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_do_not_depend_on_their_company(kind: str) -> None:
    vocab = 32_000
    logits = torch.randn(16, vocab, device="cuda") * 3
    draws = torch.rand(16, dtype=torch.float64, device="cuda")
    settings = [replace(KINDS[kind][i % len(KINDS[kind])], cfg_scale=None) for i in range(16)]
    operations = Kind.of(settings)

    together = sample(logits, slots_of(settings, vocab, device="cuda"), draws, operations).ids

    for row, own in enumerate(settings):
        slots, one = slots_of([own], vocab, device="cuda"), slice(row, row + 1)
        assert torch.equal(
            sample(logits[one], slots, draws[one], Kind.of([own])).ids, together[one]
        )


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rows_that_are_not_finite_are_marked(kind: str) -> None:
    settings = [KINDS[kind][i % len(KINDS[kind])] for i in range(4)]
    logits = torch.randn(4, 32_000, device="cuda")
    logits[0, 5], logits[1, 6], logits[2] = -math.nan, math.inf, -math.inf

    draws = torch.full((4,), 0.5, dtype=torch.float64, device="cuda")
    slots = slots_of(settings, 32_000, device="cuda")
    ids = sample(logits, slots, draws, Kind.of(settings)).ids.tolist()

    assert ids[:3] == [-1, -1, -1]
    assert 0 <= ids[3] < 32_000
