"""The sampler chain: logits → probabilities → truncation steps → one draw.

Candidates are ordered by falling probability, then rising id, so that equal draws give equal tokens
on every device. Each step keeps a prefix of that order and renormalizes.
"""

from collections.abc import Callable

import torch

from exl2flow.core.errors import InferenceError
from exl2flow.inference.sampling.settings import GREEDY_BELOW, SamplingSettings

Step = Callable[[torch.Tensor, SamplingSettings], int]


def keep_top_k(probabilities: torch.Tensor, settings: SamplingSettings) -> int:
    """Keep the k likeliest."""
    return settings.top_k or len(probabilities)


def keep_top_p(probabilities: torch.Tensor, settings: SamplingSettings) -> int:
    """Keep the shortest prefix whose mass reaches p."""
    if not 0 < settings.top_p < 1:
        return len(probabilities)
    return int((probabilities.cumsum(0) < settings.top_p).sum()) + 1


def keep_min_p(probabilities: torch.Tensor, settings: SamplingSettings) -> int:
    """Keep what has at least `min_p` times the greatest probability."""
    return int((probabilities >= settings.min_p * probabilities[0]).sum())


STEPS: tuple[Step, ...] = (keep_top_k, keep_top_p, keep_min_p)


def candidates(
    logits: torch.Tensor, settings: SamplingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids int64 (c,) and probabilities fp64 (c,) that remain after all steps.

    Args:
        logits: (v,) of one position; -infinity excludes a token.
        settings: the settings.

    Raises:
        InferenceError: NaN or +infinity among the logits, or nothing but -infinity.
    """
    if not logits.max().isfinite():
        raise InferenceError("the logits are not finite; check the files of the model")
    greedy = settings.temperature < GREEDY_BELOW
    scaled = logits.detach().cpu().double() / (1.0 if greedy else settings.temperature)
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    if greedy:
        return ids[:1], torch.ones(1, dtype=torch.float64)
    probabilities = torch.softmax(ordered, dim=0)
    probabilities = probabilities[probabilities > 0]  # rounded sums must not reach impossible ones
    for step in STEPS:
        kept = max(1, step(probabilities, settings))
        probabilities = probabilities[:kept] / probabilities[:kept].sum()
    return ids[: len(probabilities)], probabilities


def sample(logits: torch.Tensor, settings: SamplingSettings, draw: float) -> int:
    """Return a token id.

    Args:
        logits: (v,) of one position.
        settings: the settings.
        draw: a number in [0, 1), one per position.
    """
    ids, probabilities = candidates(logits, settings)
    index = int((probabilities.cumsum(0) <= draw).sum())
    return int(ids[min(index, len(ids) - 1)])
