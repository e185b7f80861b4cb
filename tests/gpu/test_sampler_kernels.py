"""Each kernel of the sampler gives what its torch twin does, step by step and all together."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampled import PLAIN, slots_of

from exl2flow.engine.sampling import Kind, SampledTokens, SamplerSlots, SamplingSettings
from exl2flow.kernels import get_ops

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
STEPS = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "smoothing": {"smoothing_factor": 0.3},
    "top-p": {"top_p": 0.9},
    "top-a": {"top_a": 0.02},
    "min-p": {"min_p": 0.03},
    "tail-free": {"tfs": 0.9},
    "typical": {"typical": 0.9},
    "few typical": {"typical": 0.2},
    "mirostat": {"mirostat": True, "mirostat_tau": 2.5},
    "late": {"temperature": 0.7, "temperature_last": True, "top_p": 0.95},
    "dynamic": {"min_temp": 0.4, "max_temp": 1.6, "temp_exponent": 0.7},
    "xtc": {"xtc_probability": 0.4, "xtc_threshold": 0.01},
    "certain xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    "skew": {"skew": -0.4},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.3},
    "fading": {
        "repetition_penalty": 0.8,
        "presence_penalty": 0.5,
        "repetition_range": 20,
        "repetition_decay": 30,
    },
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "short dry": {"dry_multiplier": 0.8, "dry_range": 40, "dry_max_ngram": 3, "dry_counts": False},
    "bias": {"token_bias": ((2, 0.5), (3, -math.inf))},
    "cfg": {"cfg_scale": 1.4},
}
TOGETHER = {name: value for step in STEPS.values() for name, value in step.items()} | {
    "typical": 0.98,
    "mirostat_tau": 5.0,
    "xtc_probability": 0.3,
}
VOCABULARY = 20_011


def drawn(rng: random.Random, top_k: int) -> SamplingSettings:
    """Return settings in which about every third step is on."""
    chosen = [step for step in STEPS.values() if rng.random() < 0.3]
    values = {name: value for step in chosen for name, value in step.items()}
    return replace(PLAIN, **values, top_k=top_k)


def histories_of(rng: random.Random, rows: int, room: int) -> list[list[int]]:
    """Return histories of all lengths, the first ones empty, of one token, and full."""
    lengths = [0, 1, room, *(rng.randrange(room) for _ in range(rows))][:rows]
    return [
        [rng.choice((rng.randrange(6), rng.randrange(VOCABULARY + 9))) for _ in range(length)]
        for length in lengths
    ]


def logits_of(rows: int, vocab: int = VOCABULARY) -> torch.Tensor:
    """Return random logits, many of them equal, zero of either sign, or excluded."""
    logits = (torch.randn(rows, vocab) * 3).half().float()
    logits[:, ::7], logits[:, 1::7], logits[:, 2::11] = 0.0, -0.0, -math.inf
    return logits


def entered(
    settings: Sequence[SamplingSettings],
    histories: Sequence[Sequence[int]],
    device: str,
    vocab: int = VOCABULARY,
    room: int = 300,
    idle: Sequence[int] = (),
) -> SamplerSlots:
    """Return slots with equal state on every device; pairs come first, the last one is masked."""
    ids = {"dry_breakers": (1, 40), "xtc_ignored": (5, *range(100, 900))}
    given = [replace(each, **ids) for each in settings]
    slots = slots_of(given, vocab, histories=histories, device=device, room=room)
    words = torch.full((-(-vocab // 32),), -1, dtype=torch.int32)
    words[1::3] = 0x5A5A
    slots.allow({len(settings) - 1: words})
    if len(settings) > 2 and settings[0].cfg_scale is not None:
        slots.pair(0, 1)
    for slot in idle:
        slots.leave(slot)
    return slots


@torch.inference_mode()
def compared(
    settings: Sequence[SamplingSettings],
    logits: torch.Tensor,
    histories: Sequence[Sequence[int]],
    **options: Any,
) -> SampledTokens:
    """Check three draws of the device against those of the twin; return the last."""
    kind = Kind.of(settings, masked=True, top=8, probabilities=True)
    here, there = (entered(settings, histories, device, **options) for device in ("cpu", DEVICE))
    held = logits.to(DEVICE)
    for draws in torch.rand(3, len(settings), dtype=torch.float64):
        expected = get_ops("cpu").sample(logits, here.state(len(logits), kind), draws, kind)
        state = there.state(len(logits), kind)
        found = get_ops(DEVICE).sample(held, state, draws.to(DEVICE), kind)
        fine = expected.ids >= 0
        assert found.ids.tolist() == expected.ids.tolist(), settings
        for mine, theirs in (
            (found.probabilities, expected.probabilities),
            (found.top_probabilities, expected.top_probabilities),
        ):
            torch.testing.assert_close(mine.cpu()[fine], theirs[fine], rtol=1e-6, atol=1e-12)
        kept = expected.top_probabilities[fine] > 1e-12
        assert found.top_ids.cpu()[fine][kept].tolist() == expected.top_ids[fine][kept].tolist()
    assert torch.equal(held.cpu(), logits) or not fine.all()
    for mine, theirs in zip(there.tensors(), here.tensors(), strict=True):
        rows = fine if mine is there.mu else slice(None)
        torch.testing.assert_close(mine.cpu()[rows], theirs[rows], rtol=1e-6, atol=0)
    return found


@pytest.mark.parametrize("top_k", [50, 1000, 0])
@pytest.mark.parametrize("step", [*STEPS, "together"])
def test_a_step_is_that_of_the_twin(step: str, top_k: int) -> None:
    rng = random.Random(step)
    changes = TOGETHER if step == "together" else STEPS[step]
    settings = [replace(PLAIN, **changes, top_k=top_k)] * 5

    compared(settings, logits_of(5), histories_of(rng, 5, 300))


@pytest.mark.parametrize("top_k", [1, 64, 200, 1024, 3000, 0])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_any_settings_may_stand_side_by_side(rows: int, top_k: int) -> None:
    rng = random.Random(rows + top_k)
    for _ in range(3):
        settings = [drawn(rng, rng.choice((1, top_k))) for _ in range(rows)]

        compared(settings, logits_of(rows), histories_of(rng, rows, 300))


@pytest.mark.parametrize("top_k", [50, 0])
def test_idle_slots_write_beyond_their_history(top_k: int) -> None:
    rng = random.Random(top_k)
    settings = [replace(PLAIN, **TOGETHER, top_k=top_k)] * 5

    compared(settings, logits_of(5), histories_of(rng, 5, 300), idle=(0, 2, 3))


@pytest.mark.parametrize("vocab", [1, 3, 40, 1024, 1025, 16_384, 151_936])
def test_any_vocabulary_is_sampled(vocab: int) -> None:
    rng = random.Random(vocab)
    for top_k in (1, 50, 0):
        settings = [replace(drawn(rng, top_k), token_bias=()) for _ in range(3)]
        histories = [[rng.randrange(vocab + 1) for _ in range(50)] for _ in range(3)]
        logits = torch.randn(3, vocab) * 3

        compared(settings, logits, histories, vocab=vocab)


@pytest.mark.parametrize("token", [0, 3, 4096])
@pytest.mark.parametrize("room", [5000, 40_000])
def test_long_histories_are_searched(room: int, token: int) -> None:
    rng = random.Random(room)
    text = [rng.randrange(50) for _ in range(room - 3)]
    loop = [token] * (room - 3)
    parts = text[: room // 2] + text[: room // 2 - 3]
    settings = [replace(PLAIN, **STEPS["dry"], **STEPS["penalties"], top_k=50)] * 4
    settings[1] = replace(settings[1], dry_base=1.01, dry_max_ngram=1024)

    compared(settings, logits_of(4), [loop, parts, text, []], room=room)


@pytest.mark.parametrize("top_k", [1, 64, 1024, 0])
def test_rows_of_equal_logits_are_taken_by_id(top_k: int) -> None:
    settings = [replace(PLAIN, top_k=top_k), replace(PLAIN, top_k=top_k, typical=0.5)]

    found = compared(settings, torch.zeros(2, VOCABULARY), [(), ()])

    assert found.top_ids[0].tolist() == list(range(8))


@pytest.mark.parametrize("top_k", [1, 50, 1000, 0])
def test_rows_that_are_not_finite_leave_the_others_alone(top_k: int) -> None:
    logits = logits_of(9)
    logits[0, 7], logits[1, 6], logits[2] = math.nan, math.inf, -math.inf
    logits[4, 70], logits[6, -1] = -math.nan, -math.nan
    settings = [drawn(random.Random(row), top_k) for row in range(9)]
    settings = [replace(each, cfg_scale=None) for each in settings]

    found = compared(settings, logits, [()] * 9)

    assert [row for row in range(9) if found.ids[row] < 0] == [0, 1, 2, 4, 6]
    assert ((found.top_ids >= 0) & (found.top_ids < VOCABULARY)).all()


@pytest.mark.parametrize("top_k", [50, 1000, 0])
@torch.inference_mode()
def test_every_run_gives_the_same_bits(top_k: int) -> None:
    rng = random.Random(0)
    settings, histories = [replace(PLAIN, **TOGETHER, top_k=top_k)] * 16, histories_of(rng, 16, 300)
    logits, draws = logits_of(16).to(DEVICE), torch.rand(16, dtype=torch.float64).to(DEVICE)
    kind, runs = Kind.of(settings, masked=True, top=8, probabilities=True), []
    for _ in range(20):
        slots = entered(settings, histories, DEVICE)
        runs.append(get_ops(DEVICE).sample(logits, slots.state(16, kind), draws, kind))

    for run in runs[1:]:
        assert torch.equal(run.ids, runs[0].ids)
        assert torch.equal(run.probabilities, runs[0].probabilities)
        assert torch.equal(run.top_ids, runs[0].top_ids)
        assert torch.equal(run.top_probabilities, runs[0].top_probabilities)
