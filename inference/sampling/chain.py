"""The sampler chain: logits → probabilities → truncation steps → one draw, for all rows of a batch.

Candidates are ordered by falling probability, then rising id, so equal draws give equal tokens on
every device. Each step keeps a prefix of that order and renormalizes: it compares with shares of
the prefix's mass. No operation waits for the device, so the whole chain can be recorded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from exl2flow.inference.sampling.rows import SamplerRows

NOT_FINITE = -1  # replaces the id of a row with NaN or +infinity, or with only -infinity
RUN = 512  # numbers summed by one scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The likeliest tokens per row: ids int64, probabilities and running sums fp64, (b, c)."""

    ids: torch.Tensor
    probabilities: torch.Tensor
    sums: torch.Tensor

    def mass(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the sum (b, 1) of the first `kept` (b,) probabilities."""
        return self.sums.gather(1, kept[:, None] - 1)


Step = Callable[[Ranked, torch.Tensor, torch.Tensor], torch.Tensor]


def keep_top_k(ranked: Ranked, kept: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep the k likeliest tokens."""
    return k.long()


def keep_top_p(ranked: Ranked, kept: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep the shortest prefix whose share of the mass reaches p."""
    return (ranked.sums < p[:, None] * ranked.mass(kept)).sum(-1) + 1


def keep_min_p(ranked: Ranked, kept: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep tokens with at least p times the greatest probability."""
    return (ranked.probabilities >= p[:, None] * ranked.probabilities[:, :1]).sum(-1)


STEPS: tuple[Step, ...] = (keep_top_k, keep_top_p, keep_min_p)  # in the order of a table's columns


def rank(logits: torch.Tensor, rows: SamplerRows) -> Ranked:
    """Return the likeliest `rows.most` tokens of logits (b, v) in order.

    Positive temperatures do not change the order, so raw logits are sorted, in fewer bits.
    """
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    ordered, ids = ordered[:, : rows.most], ids[:, : rows.most]
    probabilities = torch.softmax(ordered.double() / rows.table[:, :1], dim=-1)
    probabilities = probabilities.nan_to_num(nan=1.0)  # NaN rows only need indices in range
    return Ranked(ids=ids, probabilities=probabilities, sums=running_sums(probabilities))


def count_kept(ranked: Ranked, rows: SamplerRows) -> torch.Tensor:
    """Return how many of the first tokens remain after all steps, int64 (b,), 1 or more each."""
    kept = (ranked.probabilities > 0).sum(-1)  # rounded sums must not reach impossible ones
    for step, value in zip(STEPS, rows.table[:, 1:].unbind(1), strict=True):
        kept = torch.minimum(kept, step(ranked, kept, value))
    return kept


def sample(logits: torch.Tensor, rows: SamplerRows, draws: torch.Tensor) -> torch.Tensor:
    """Return token ids int64 (b,), `NOT_FINITE` where logits are not finite.

    Args:
        logits: (b, v), one position per sequence; -infinity excludes a token.
        rows: the settings of each sequence.
        draws: fp64 (b,) in [0, 1), one per sequence.
    """
    if rows.most == 1:
        best, ids = logits.max(dim=-1)  # the first of equals
    else:
        best, ranked = logits.amax(dim=-1), rank(logits, rows)
        kept = count_kept(ranked, rows)
        index = (ranked.sums <= draws[:, None] * ranked.mass(kept)).sum(-1)
        ids = ranked.ids.gather(1, torch.minimum(index, kept - 1)[:, None])[:, 0]
    return ids.masked_fill(~(best.abs() < math.inf), NOT_FINITE)


def running_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the running sums of x (b, c) along each row.

    Long rows are summed in runs: torch's scan of a single long row has no fixed order on a GPU,
    and for several rows it uses one CTA each.
    """
    b, c = x.shape
    if c <= RUN:
        return x.cumsum(-1)
    runs = pad(x, (0, -c % RUN)).view(b, -1, RUN).cumsum(-1)
    before = pad(runs[:, :-1, -1].cumsum(-1), (1, 0))
    return (runs + before[..., None]).view(b, -1)[:, :c]
