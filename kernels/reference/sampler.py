"""The torch implementation of sampling: the reference for choose.cu.

Logits → ranked candidates → steps that drop or reweigh them → a race. A step takes weights
fp64 (n, c), which need not sum to 1, and sets those of dropped candidates to 0.
"""

import math

import torch
from torch.nn.functional import pad

from exl2flow.kernels.interface.sampling import (
    NOT_FINITE,
    SampledTokens,
    SamplerState,
    SamplerSteps,
)
from exl2flow.kernels.reference.logits import Numbers, adjusted, contains

LEAST = 1e-300  # dropped tokens weigh less
NEAR = 5e-8  # nats that the entropy is taken less, so that of equal distances likelier tokens win
LOW = 2**32 - 1
GOLDEN = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed number
FRACTION = 53  # bits of a draw


def sample(
    logits: torch.Tensor, state: SamplerState, draws: torch.Tensor, steps: SamplerSteps
) -> SampledTokens:
    """Choose an id for each row, and append it to its history.

    Candidates are ordered by falling probability, then rising id, so equal draws give equal
    tokens on every device. Nothing waits for the device, so the whole can be recorded.

    Args:
        logits: fp32 (n, width), kept as they are; -infinity excludes an id.
        state: of n rows; counts, histories and mu of active ones advance.
        draws: fp64 (n,) in [0, 1).
        steps: serve the settings of all active rows.
    """
    scores, numbers = adjusted(logits, state, steps), state.numbers
    if steps.most == 1:
        best, ids = scores.max(dim=-1)  # the first of equals
        sampled = SampledTokens(ids=ids, probabilities=torch.ones_like(draws))
    else:
        ids, ordered = rank(scores, steps.most)
        best = ordered[:, 0]
        weights = weigh(ordered, numbers, steps.rest)
        if steps.rest:
            ids, weights = reshape(ids, weights, state, numbers, steps.sorts)
        entered = bent(weights, numbers["skew"]) if steps.rest else weights
        sampled = chosen(ids, weights, race(ids, entered, draws), steps.top)
        if steps.rest:
            learn(state, numbers, sampled)
    return finish(sampled, state, finite(logits, best, state, steps.cfg), steps)


def finite(
    logits: torch.Tensor, best: torch.Tensor, state: SamplerState, is_mixed: bool
) -> torch.Tensor:
    """Return (n,) which rows are finite; `best` (n,) is the greatest of the adjusted logits."""
    greatest = logits[:, : state.vocab_size].amax(dim=-1)  # NaN wins
    if is_mixed:
        greatest = greatest + 0 * greatest[state.partner]
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


def weigh(ordered: torch.Tensor, numbers: Numbers, rest: bool) -> torch.Tensor:
    """Return weights of ordered logits (n, c), the likeliest 1, after the steps that keep a prefix.

    exp((l - max) / T), or exp(-f (l - max)^2 / T) with a smoothing factor f.
    """
    scaled, places = ordered.double(), _places(ordered)
    scaled = scaled - scaled[:, :1]
    if rest:
        factor = numbers["smoothing_factor"]
        scaled = torch.where(factor > 0, -factor * scaled * scaled, scaled)
    weights = torch.exp(scaled / numbers["temperature"])
    weights = weights.nan_to_num_(nan=1.0)  # rows with NaN only need indices in range
    sums = weights.cumsum(-1)
    prefix = torch.minimum((weights > 0).sum(-1, keepdim=True), numbers["top_k"].long())
    mass = sums.gather(1, prefix - 1)
    prefix = torch.minimum(prefix, (sums < numbers["top_p"] * mass).sum(-1, keepdim=True) + 1)
    least = numbers["min_p"]
    if rest:
        least = torch.maximum(least, numbers["top_a"] / sums.gather(1, prefix - 1))
    prefix = torch.minimum(prefix, (weights >= least).sum(-1, keepdim=True)).clamp_min_(1)
    if rest:
        prefix = drop_tail(weights, prefix, numbers["tfs"])
    return weights.masked_fill_(places >= prefix, 0)


def reshape(
    ids: torch.Tensor, weights: torch.Tensor, state: SamplerState, numbers: Numbers, sorts: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the steps that keep no prefix; return ids and weights (n, c), in order again."""
    if sorts:
        weights = keep_typical(weights, numbers["typical"])
    weights = limit_surprise(weights, state.mu[:, None])
    weights = reheat(weights, numbers)
    if sorts:
        assert state.ignored is not None
        weights = spare_unlikely(weights, contains(state.ignored, ids), numbers)
        weights, order = torch.sort(weights, dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return ids, weights


def bent(weights: torch.Tensor, skew: torch.Tensor) -> torch.Tensor:
    """Return weights (n, c) whose running shares F become F^(1 / skew)."""
    sums = weights.cumsum(-1)
    shares = (sums / sums[:, -1:]) ** (1 / skew)
    moved = torch.diff(shares, dim=-1, prepend=torch.zeros_like(shares[:, :1])).clamp_min_(LEAST)
    return torch.where((weights > 0) & (skew != 1), moved, weights)


def race(ids: torch.Tensor, weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the place (n, 1) of the id that arrives first at a speed of its weight (n, c).

    The ways are exponential, so an id wins with its share of the weights. Each follows from the
    row's draw and the id alone: small changes of weights rarely change the winner.
    """
    times = -uniform(draws, ids).log() / weights
    return times.masked_fill_(weights <= 0, math.inf).argmin(-1, keepdim=True)


def uniform(draws: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return numbers in (0, 1), fp64 (n, c), of draws (n,) and ids (n, c): SplitMix64."""
    x = (draws * 2.0**FRACTION).long()[:, None] + (ids + 1) * GOLDEN
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 64 - FRACTION + 1).double() + 0.5) * 2.0 ** (1 - FRACTION)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, as if without a sign."""
    return x.bitwise_right_shift(bits) & ((1 << 64 - bits) - 1)


def chosen(
    ids: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, top: int
) -> SampledTokens:
    """Return the ids at a place (n, 1) of candidates (n, c) with their shares."""
    total = weights.sum(-1, keepdim=True)
    shares = weights[:, :top] / total if top else None
    return SampledTokens(
        ids=ids.gather(1, place)[:, 0],
        probabilities=(weights.gather(1, place) / total)[:, 0],
        top_ids=ids[:, :top] if top else None,
        top_probabilities=shares,
    )


def learn(state: SamplerState, numbers: Numbers, sampled: SampledTokens) -> None:
    """Advance Mirostat's bound: mu + eta (tau + log2 p)."""
    assert sampled.probabilities is not None
    error = numbers["mirostat_tau"][:, 0] + sampled.probabilities.log2()
    state.mu.add_(state.active * numbers["mirostat_eta"][:, 0] * error)


def finish(
    sampled: SampledTokens, state: SamplerState, fine: torch.Tensor, steps: SamplerSteps
) -> SampledTokens:
    """Mark rows that are not finite, share the ids of pairs, and append all to the histories."""
    last, active, counts = state.history.shape[1] - 1, state.active, state.counts
    ids = sampled.ids.masked_fill(~fine, NOT_FINITE)
    if steps.cfg:
        ids = ids[state.lead]
    place = torch.where(active > 0, counts, last).long()  # idle slots write beyond the history
    known = torch.where(ids < 0, state.vocab_size, ids).int()
    state.history.scatter_(1, place[:, None], known[:, None])
    counts.add_(active).clamp_max_(last)
    return SampledTokens(
        ids=ids,
        probabilities=sampled.probabilities if steps.probabilities else None,
        top_ids=sampled.top_ids,
        top_probabilities=sampled.top_probabilities,
    )


def drop_tail(weights: torch.Tensor, prefix: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return how many of the first `prefix` (n, 1) tokens remain after tail-free sampling.

    d_i = |p_i - 2 p_(i+1) + p_(i+2)|; as many as have a running share of d within the bound, and
    one more. Fewer than three candidates stay.
    """
    if weights.shape[1] < 3:
        return prefix
    curve = (weights[:, :-2] - 2 * weights[:, 1:-1] + weights[:, 2:]).abs_()
    within = _places(curve) < prefix - 2
    sums = (curve * within).cumsum(-1)
    leading = ((sums <= bound * sums[:, -1:]) & within).sum(-1, keepdim=True)
    return torch.where((bound < 1) & (prefix > 2), leading + 1, prefix)


def keep_typical(weights: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Keep the tokens nearest to the entropy, |-ln p - H|, whose mass reaches the bound."""
    shares, entropy = entropy_of(weights)
    distances = (shares.log() + (entropy - NEAR)).abs_()
    order = torch.sort(distances, dim=-1, stable=True).indices
    sums = shares.gather(1, order).cumsum(-1)
    dropped = pad(sums[:, :-1], (1, 0)) >= bound  # the mass of those before suffices
    return weights.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), 0)


def entropy_of(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shares of the mass, and their entropy (n, 1) in nats."""
    shares = weights / weights.sum(-1, keepdim=True)
    return shares, torch.special.entr(shares).sum(-1, keepdim=True)


def limit_surprise(weights: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Keep tokens with p >= 2^-mu, and always the likeliest (Mirostat 2)."""
    least = torch.exp2(-mu) * weights.sum(-1, keepdim=True)
    first = weights.argmax(-1, keepdim=True)
    return weights.masked_fill((weights < least) & (_places(weights) != first), 0)


def reheat(weights: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """Return p^(1/T), T = low + (high - low) (H / ln n)^exponent for n candidates of entropy H."""
    _, entropy = entropy_of(weights)
    count = (weights > 0).sum(-1, keepdim=True).clamp_min_(2)
    flatness = (entropy / count.log()).clamp_min_(0) ** numbers["temp_exponent"]
    heat = numbers["min_temp"] + (numbers["max_temp"] - numbers["min_temp"]) * flatness
    return (weights / weights.amax(-1, keepdim=True)) ** (1 / heat)


def spare_unlikely(weights: torch.Tensor, spared: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """Apply the expected outcome of XTC, which drops likely tokens with a probability P.

    Likely are all with p >= threshold that are not spared; the least likely of them counts as
    unlikely. With x their mass, they keep p (1 - P); others get p (1 + P x / (1 - x)).
    """
    places = _places(weights)
    least = numbers["xtc_threshold"] * weights.sum(-1, keepdim=True)
    likely = (weights >= least.clamp_min_(LEAST)) & ~spared
    last = torch.where(likely, places, -1).amax(-1, keepdim=True)
    likely &= places < last
    mass = (weights * likely).sum(-1, keepdim=True)
    others = (weights * ~likely).sum(-1, keepdim=True)
    share = numbers["xtc_probability"]
    return weights * torch.where(likely, 1 - share, 1 + share * mass / others)


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device)
