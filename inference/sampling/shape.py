"""The chain's steps beyond temperature, top-k, top-p and min-p, on ordered weights fp64 (n, c)."""

import torch
from torch.nn.functional import pad

Numbers = dict[str, torch.Tensor]  # settings by column, (n, 1) each
RUN = 128  # numbers summed by one scan; vocabularies are often multiples of it
LEAST = 1e-300  # dropped tokens weigh less


def drop_tail(
    weights: torch.Tensor, kept: torch.Tensor, bound: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Return how many of the first `kept` (n, 1) tokens remain after tail-free sampling.

    d_i = |p_i - 2 p_(i+1) + p_(i+2)|; as many as have a running share of d within the bound, and
    one more. Fewer than three candidates stay.
    """
    if weights.shape[1] < 3:
        return kept
    curve = (weights[:, :-2] - 2 * weights[:, 1:-1] + weights[:, 2:]).abs_()
    within = places[:-2] < kept - 2
    sums = running_sums(curve * within)
    leading = ((sums <= bound * sums[:, -1:]) & within).sum(-1, keepdim=True)
    return torch.where((bound < 1) & (kept > 2), leading + 1, kept)


def keep_typical(weights: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Keep the tokens nearest to the entropy, |-ln p - H|, whose mass reaches the bound."""
    shares, entropy = entropy_of(weights)
    distances = (shares.log() + entropy).abs_().float()  # sorted in half the time
    order = torch.sort(distances, dim=-1, stable=True).indices
    sums = running_sums(shares.gather(1, order))
    dropped = pad(sums[:, :-1], (1, 0)) >= bound  # the mass of those before suffices
    return weights.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), 0)


def entropy_of(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shares of the mass, and their entropy (n, 1) in nats."""
    shares = weights / weights.sum(-1, keepdim=True)
    return shares, torch.special.entr(shares).sum(-1, keepdim=True)


def limit_surprise(weights: torch.Tensor, mu: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Keep tokens with p >= 2^-mu, and always the likeliest (Mirostat 2)."""
    least = torch.exp2(-mu) * weights.sum(-1, keepdim=True)
    first = weights.argmax(-1, keepdim=True)
    return weights.masked_fill((weights < least) & (places != first), 0)


def reheat(weights: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """Return p^(1/T), T = low + (high - low) (H / ln n)^exponent for n candidates of entropy H."""
    _, entropy = entropy_of(weights)
    count = (weights > 0).sum(-1, keepdim=True).clamp_min_(2)
    flatness = (entropy / count.log()).clamp_min_(0) ** numbers["temp_exponent"]
    heat = numbers["min_temp"] + (numbers["max_temp"] - numbers["min_temp"]) * flatness
    return (weights / weights.amax(-1, keepdim=True)) ** (1 / heat)


def spare_unlikely(
    weights: torch.Tensor, spared: torch.Tensor, numbers: Numbers, places: torch.Tensor
) -> torch.Tensor:
    """Apply the expected outcome of XTC, which drops likely tokens with a probability P.

    Likely are all with p >= threshold that are not spared; the least likely of them counts as
    unlikely. With x their mass, they keep p (1 - P); others get p (1 + P x / (1 - x)).
    """
    least = numbers["xtc_threshold"] * weights.sum(-1, keepdim=True)
    likely = (weights >= least.clamp_min_(LEAST)) & ~spared
    last = torch.where(likely, places, -1).amax(-1, keepdim=True)
    likely &= places < last
    mass = (weights * likely).sum(-1, keepdim=True)
    others = (weights * ~likely).sum(-1, keepdim=True)
    share = numbers["xtc_probability"]
    return weights * torch.where(likely, 1 - share, 1 + share * mass / others)


def running_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the running sums of x (n, c) along each row.

    Long rows are summed in runs, and those in runs again: torch's scan of a single long row has no
    fixed order on a GPU, and for several rows it uses one CTA each.
    """
    n, c = x.shape
    if c <= RUN:
        return x.cumsum(-1)
    runs = (pad(x, (0, -c % RUN)) if c % RUN else x).view(n, -1, RUN).cumsum(-1)
    before = pad(running_sums(runs[:, :-1, -1]), (1, 0))
    return (runs + before[..., None]).view(n, -1)[:, :c]
