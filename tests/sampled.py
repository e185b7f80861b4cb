"""The sampler chain for a single row: what remains of its candidates, and what is drawn."""

import torch

from exl2flow.inference.sampling import Drawn, SamplerRows, SamplingSettings
from exl2flow.inference.sampling import sample as sample_rows
from exl2flow.inference.sampling.chain import count_kept, rank


def candidates(
    logits: torch.Tensor, settings: SamplingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids (c,) that remain after all steps, and their probabilities fp64 (c,)."""
    rows = SamplerRows.of([settings])
    ranked = rank(logits[None], rows)
    kept = int(count_kept(ranked, rows))
    probabilities = ranked.probabilities[0, :kept]
    return ranked.ids[0, :kept], probabilities / probabilities.sum()


def sample(logits: torch.Tensor, settings: SamplingSettings, draw: float) -> int:
    """Return the token that logits (v,) and a draw give."""
    draws = torch.tensor([draw], dtype=torch.float64)
    (token,) = Drawn(sample_rows(logits[None], SamplerRows.of([settings]), draws)).read()
    return token
