"""The sampler for a few rows, and a slow one in plain Python that follows its order of steps."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from exl2flow.engine.sampling import Kind, SampledTokens, SamplerSlots, SamplingSettings
from exl2flow.engine.sampling import sample as sample_rows

PLAIN = SamplingSettings(temperature=1.0, top_k=0, top_p=0.0)


def slots_of(
    settings: Sequence[SamplingSettings],
    vocab: int,
    *,
    histories: Sequence[Sequence[int]] = (),
    device: str = "cpu",
    room: int = 64,
) -> SamplerSlots:
    """Return slots that sequences with these settings and histories have entered."""
    slots = SamplerSlots(
        slots=len(settings), max_tokens=room, vocab_size=vocab, width=vocab, device=device
    )
    for slot, each in enumerate(settings):
        slots.enter(slot, each, histories[slot] if histories else ())
    return slots


def sampled(
    logits: torch.Tensor, settings: SamplingSettings, draw: float = 0.5, history: Sequence[int] = ()
) -> SampledTokens:
    """Return what logits (v,) and a draw give, with all candidates."""
    slots = slots_of([settings], len(logits), histories=[history])
    kind = replace(Kind.of([settings], top=len(logits), probabilities=True), most=None)
    draws = torch.tensor([draw], dtype=torch.float64)
    return sample_rows(logits[None].float(), slots, draws, kind)


def distribution(
    logits: torch.Tensor, settings: SamplingSettings, history: Sequence[int] = ()
) -> dict[int, float]:
    """Return id → probability of the candidates that remain, in order."""
    found = sampled(logits, settings, 0.5, history)
    assert found.top_ids is not None
    assert found.top_probabilities is not None
    pairs = zip(found.top_ids[0].tolist(), found.top_probabilities[0].tolist(), strict=True)
    return {token: probability for token, probability in pairs if probability > 0}


def sample(logits: torch.Tensor, settings: SamplingSettings, draw: float) -> int:
    """Return the token that logits (v,) and a draw give."""
    draws = torch.tensor([draw], dtype=torch.float64)
    slots = slots_of([settings], len(logits))
    (token,) = sample_rows(logits[None], slots, draws, Kind.of([settings])).ids.tolist()
    return token


def penalized(logits: np.ndarray, s: SamplingSettings, history: Sequence[int]) -> np.ndarray:
    """Walk a history from its newest token to its oldest, as penalties are defined."""
    result, met = logits.astype(np.float64), set[int]()
    for back, token in enumerate(reversed(history)):
        share = 1.0
        if 0 <= s.repetition_range <= back:
            if back >= s.repetition_range + s.repetition_decay:
                break
            share = 1 - (back - s.repetition_range + 1) / s.repetition_decay
        if token >= len(logits):
            continue
        if token not in met:
            factor = 1 + (s.repetition_penalty - 1) * share
            result[token] *= factor if result[token] <= 0 else 1 / factor
            result[token] -= s.presence_penalty * share
            met.add(token)
        result[token] -= s.frequency_penalty * share
    return result.astype(np.float32)


def without_repetitions(
    logits: np.ndarray, s: SamplingSettings, history: Sequence[int]
) -> np.ndarray:
    """Apply DRY: find the longest suffix that occurred before, by comparing slices."""
    given = s.dry_breakers or ()
    context = list(history[-s.dry_range :] if s.dry_range else history)
    for length in range(min(s.dry_max_ngram, len(context) - 1), s.dry_allowed_length - 1, -1):
        suffix = context[-length:]
        after = [
            context[i + length]
            for i in range(len(context) - length)
            if context[i : i + length] == suffix and context[i + length] not in given
        ]
        if not after or set(suffix) & set(given):
            continue
        result = logits.astype(np.float64)
        penalty = s.dry_multiplier * s.dry_base ** (length - s.dry_allowed_length)
        for token in set(after):
            result[token] -= penalty * (after.count(token) if s.dry_counts else 1)
        return result.astype(np.float32)
    return logits


def reference(
    logits: torch.Tensor,
    s: SamplingSettings,
    history: Sequence[int] = (),
    *,
    allowed: Collection[int] | None = None,
    mu: float | None = None,
) -> dict[int, float]:
    """Return id → probability in the final order, step by step as the settings define them."""
    values = penalized(logits.float().numpy(), s, history)
    for token, bias in s.token_bias:
        values[token] += np.float32(bias)
    if s.dry_multiplier:
        values = without_repetitions(values, s, history)
    if allowed is not None:
        values = np.array([x if i in allowed else -math.inf for i, x in enumerate(values)])
    distances = values.astype(np.float64) - float(values.max())
    is_greedy = s.temperature < 0.01
    heat = 1.0 if s.temperature_last or is_greedy else s.temperature
    if s.smoothing_factor:
        distances = -s.smoothing_factor * distances**2
    weights = dict(enumerate(np.exp(distances / heat).tolist()))
    order = sorted(weights, key=lambda i: (-values[i], i))
    p = _normal({i: weights[i] for i in order if weights[i] > 0})
    count = 1 if is_greedy else s.top_k or len(p)
    p = _normal(dict([*p.items()][:count]))
    if 0 < s.top_p < 1:
        p = _until(p, s.top_p)
    if s.top_a:
        p = _where(p, lambda x, most: x >= s.top_a * most**2)
    p = _where(p, lambda x, most: x >= s.min_p * most)
    if 0 < s.tfs < 1 and len(p) > 2:
        x = np.array([*p.values()])
        curve = np.abs(x[:-2] - 2 * x[1:-1] + x[2:])
        leading = int((np.cumsum(curve) <= s.tfs * curve.sum()).sum())
        p = _normal(dict([*p.items()][: leading + 1]))
    if 0 < s.typical < 1:
        entropy = _entropy(p)
        nearest = sorted(p, key=lambda i: abs(-math.log(p[i]) - entropy))
        kept = _until({i: p[i] for i in nearest}, s.typical)
        p = _normal({i: x for i, x in p.items() if i in kept})
    if s.mirostat:
        bound = 2.0 ** -(2 * s.mirostat_tau if mu is None else mu)
        p = _where(p, lambda x, most: x >= bound)
    low, high = (s.temperature, s.temperature) if s.temperature_last else (1.0, 1.0)
    if s.max_temp > s.min_temp:
        low, high = s.min_temp, s.max_temp
    if len(p) > 1 and (low, high) != (1.0, 1.0):
        heat = low + (high - low) * (_entropy(p) / math.log(len(p))) ** s.temp_exponent
        p = _normal({i: (x / max(p.values())) ** (1 / heat) for i, x in p.items()})
    if s.xtc_probability:
        given = s.xtc_ignored or ()
        likely = [i for i, x in p.items() if x >= s.xtc_threshold and i not in given][:-1]
        mass = sum(p[i] for i in likely)
        share = s.xtc_probability
        p = {
            i: x * (1 - share) if i in likely else x * (1 + share * mass / (1 - mass))
            for i, x in p.items()
        }
        p = {i: p[i] for i in sorted(p, key=lambda i: -p[i]) if p[i] > 0}
    return p


def _normal(p: dict[int, float]) -> dict[int, float]:
    total = sum(p.values())
    return {i: x / total for i, x in p.items()}


def _until(p: dict[int, float], bound: float) -> dict[int, float]:
    kept, mass = dict[int, float](), 0.0
    for token, x in p.items():
        if mass >= bound:
            break
        kept[token] = x
        mass += x
    return _normal(kept)


def _where(p: dict[int, float], holds) -> dict[int, float]:  # type: ignore[no-untyped-def]
    first, *others = p
    return _normal({i: p[i] for i in [first, *(i for i in others if holds(p[i], p[first]))]})


def _entropy(p: dict[int, float]) -> float:
    return -sum(x * math.log(x) for x in p.values() if x > 0)
