"""The sampler: logits → ranked candidates → steps that drop or reweigh them → one draw per row.

Candidates are ordered by falling probability, then rising id, so equal draws give equal tokens on
every device. A step takes weights fp64 (n, c), which need not sum to 1, and sets those of dropped
candidates to 0. No operation waits for the device, so the whole can be recorded.
"""

import math
from dataclasses import dataclass

import torch

from exl2flow.inference.sampling.adjust import adjusted
from exl2flow.inference.sampling.bits import contains
from exl2flow.inference.sampling.kind import Kind
from exl2flow.inference.sampling.shape import (
    Numbers,
    drop_tail,
    keep_typical,
    limit_surprise,
    reheat,
    running_sums,
    spare_unlikely,
)
from exl2flow.inference.sampling.slots import SamplerSlots

NOT_FINITE = -1  # the id of a row with NaN or +infinity, or with nothing but -infinity
LOW = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a call of `sample` chose; a recording's next replay overwrites it.

    ids: int64 (n,), `NOT_FINITE` for a row whose logits are not finite.
    probabilities: fp64 (n,) in the final distribution; None unless the kind wants them.
    top_ids, top_probabilities: (n, k), descending, ids that were dropped with probability 0; None
        unless the kind wants them.
    """

    ids: torch.Tensor
    probabilities: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_probabilities: torch.Tensor | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, slots: SamplerSlots, draws: torch.Tensor, kind: Kind) -> Sampled:
    """Choose an id for each of the first n slots, and append it to its history.

    Args:
        logits: fp32 (n, width), kept as they are; -infinity excludes an id.
        slots: settings and state; counts, histories and mu of active slots advance.
        draws: fp64 (n,) in [0, 1).
        kind: serves the settings of all active slots among them.
    """
    numbers = slots.numbers(len(logits))
    found = adjusted(logits, slots, numbers, kind)
    if kind.most == 1:
        best, ids = found.max(dim=-1)  # the first of equals
        sampled = Sampled(ids=ids, probabilities=torch.ones_like(draws))
    else:
        ids, ordered = rank(found, kind.most)
        best = ordered[:, 0]
        weights = weigh(ordered, numbers, slots.places, kind)
        if kind.rest:
            ids, weights = reshape(ids, weights, slots, numbers, kind)
            draws = draws ** numbers["skew"][:, 0]
        sampled = draw(ids, weights, draws, kind.top)
        if kind.rest:
            learn(slots, numbers, sampled)
    return finish(sampled, slots, finite(logits, best, slots, kind), kind)


def finite(
    logits: torch.Tensor, best: torch.Tensor, slots: SamplerSlots, kind: Kind
) -> torch.Tensor:
    """Return (n,) which rows are finite; `best` (n,) is the greatest of the adjusted logits."""
    greatest = logits[:, : slots.vocab_size].amax(dim=-1)  # NaN wins
    if kind.cfg:
        greatest = greatest + 0 * greatest[slots.partner[: len(logits)]]
    return (greatest.abs() < math.inf) & (best.abs() < math.inf)


def rank(logits: torch.Tensor, most: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and logits of the likeliest `most` tokens in order, (n, c) each.

    Neither temperature nor smoothing changes the order, so fp32 logits are compared: their bits and
    the id form one integer key.
    """
    vocab = logits.shape[1]
    if most is None or most > vocab // 4:
        ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return ids[:, :most], ordered[:, :most]
    bits = logits.view(torch.int32)
    bits = torch.where(bits < 0, -(2**31) - bits, bits)  # ordered as the logits are; -0.0 is 0.0
    falling = torch.arange(LOW, LOW - vocab, -1, device=logits.device)
    keys = torch.add(falling, bits, alpha=2**32).topk(most, dim=-1).values
    ids = LOW - (keys & LOW)
    return ids, logits.gather(1, ids)


def weigh(
    ordered: torch.Tensor, numbers: Numbers, places: torch.Tensor, kind: Kind
) -> torch.Tensor:
    """Return weights of ordered logits (n, c), the likeliest 1, after the steps that keep a prefix.

    exp((l - max) / T), or exp(-f (l - max)^2 / T) with a smoothing factor f.
    """
    scaled, places = ordered.double(), places[: ordered.shape[1]]
    scaled = scaled - scaled[:, :1]
    if kind.rest:
        factor = numbers["smoothing_factor"]
        scaled = torch.where(factor > 0, -factor * scaled * scaled, scaled)
    weights = torch.exp(scaled / numbers["temperature"])
    weights = weights.nan_to_num_(nan=1.0)  # rows with NaN only need indices in range
    sums = running_sums(weights)
    kept = torch.minimum((weights > 0).sum(-1, keepdim=True), numbers["top_k"].long())
    mass = sums.gather(1, kept - 1)
    kept = torch.minimum(kept, (sums < numbers["top_p"] * mass).sum(-1, keepdim=True) + 1)
    least = numbers["min_p"]
    if kind.rest:
        least = torch.maximum(least, numbers["top_a"] / sums.gather(1, kept - 1))
    kept = torch.minimum(kept, (weights >= least).sum(-1, keepdim=True)).clamp_min_(1)
    if kind.rest:
        kept = drop_tail(weights, kept, numbers["tfs"], places)
    return weights.masked_fill_(places >= kept, 0)


def reshape(
    ids: torch.Tensor,
    weights: torch.Tensor,
    slots: SamplerSlots,
    numbers: Numbers,
    kind: Kind,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the steps that keep no prefix; return ids and weights (n, c), in order again."""
    rows, places = len(ids), slots.places[: ids.shape[1]]
    if kind.sorts:
        weights = keep_typical(weights, numbers["typical"])
    weights = limit_surprise(weights, slots.mu[:rows, None], places)
    weights = reheat(weights, numbers)
    if kind.sorts:
        spared = contains(slots.late("ignored")[:rows], ids)
        weights = spare_unlikely(weights, spared, numbers, places)
        order = torch.sort(weights.float(), dim=-1, descending=True, stable=True).indices
        ids, weights = ids.gather(1, order), weights.gather(1, order)
    return ids, weights


def draw(ids: torch.Tensor, weights: torch.Tensor, draws: torch.Tensor, top: int) -> Sampled:
    """Return the first ids at which the running share of weights (n, c) exceeds draws (n,)."""
    sums = running_sums(weights).masked_fill_(weights <= 0, 0)  # impossible ids are never reached
    total = sums.amax(-1, keepdim=True)
    limit = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = (sums > limit).view(torch.uint8).argmax(-1, keepdim=True)  # the first
    shares = weights[:, :top] / total if top else None
    return Sampled(
        ids=ids.gather(1, place)[:, 0],
        probabilities=(weights.gather(1, place) / total)[:, 0],
        top_ids=ids[:, :top] if top else None,
        top_probabilities=shares,
    )


def learn(slots: SamplerSlots, numbers: Numbers, sampled: Sampled) -> None:
    """Advance Mirostat's bound: mu + eta (tau + log2 p)."""
    assert sampled.probabilities is not None
    rows = len(sampled.ids)
    error = numbers["mirostat_tau"][:, 0] + sampled.probabilities.log2()
    slots.mu[:rows] += slots.active[:rows] * numbers["mirostat_eta"][:, 0] * error


def finish(sampled: Sampled, slots: SamplerSlots, fine: torch.Tensor, kind: Kind) -> Sampled:
    """Mark rows that are not finite, share the ids of pairs, and append all to the histories."""
    rows, last = len(fine), slots.max_tokens
    ids = sampled.ids.masked_fill(~fine, NOT_FINITE)
    if kind.cfg:
        ids = ids[slots.lead[:rows]]
    active, counts = slots.active[:rows], slots.counts[:rows]
    place = torch.where(active > 0, counts, last).long()  # idle slots write beyond the history
    known = torch.where(ids < 0, slots.vocab_size, ids).int()
    slots.history[:rows].scatter_(1, place[:, None], known[:, None])
    counts.add_(active).clamp_max_(last)
    return Sampled(
        ids=ids,
        probabilities=sampled.probabilities if kind.probabilities else None,
        top_ids=sampled.top_ids,
        top_probabilities=sampled.top_probabilities,
    )
