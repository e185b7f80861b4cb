"""Logit processors in torch, the reference for logits.cu: CFG, penalties, bias, DRY and masks.

Penalties and DRY touch the ids of the history only. Counts
are integers, so that the order of additions does not matter; ids that occur several times are
written several times, equally.
"""

import math

import torch
from torch.nn.functional import pad

from exl2flow.kernels.interface.sampling import STRONGEST, SamplerState, SamplerSteps

Numbers = dict[str, torch.Tensor]  # settings by column, (n, 1) each


def adjusted(logits: torch.Tensor, state: SamplerState, steps: SamplerSteps) -> torch.Tensor:
    """Return logits fp32 (n, vocab_size); those given are kept."""
    vocab, numbers = state.vocab_size, state.numbers
    logits = logits[:, :vocab]
    if steps.cfg:
        logits = mixed(logits, state.partner, numbers["cfg_scale"])
    if steps.adjusts:
        logits = pad(logits, (0, 1))  # a copy; its last column takes unknown ids
    if steps.penalties:
        penalize(logits, state, numbers)
    if steps.bias:
        assert state.bias is not None
        logits[:, :vocab] += state.bias[:, :vocab]
    if steps.dry:
        penalize_repetitions(logits, state, numbers, steps.dry)
    if steps.masked:
        assert state.allowed is not None
        logits[:, :vocab].masked_fill_(without(state.allowed, vocab), -math.inf)
    return logits[:, :vocab]


def mixed(logits: torch.Tensor, partner: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return s * log_softmax(l) + (1 - s) * log_softmax(partner's l) for paired rows."""
    logits = logits.clamp_min(-STRONGEST)  # excluded ids stay finite: 0 * infinity is NaN
    greatest = logits.amax(-1, keepdim=True).double()
    norm = (logits - greatest).exp_().sum(-1, keepdim=True).log_() + greatest
    is_paired = (partner != torch.arange(len(logits), device=logits.device))[:, None]
    share = torch.where(is_paired, scale, 1)
    norm = (norm * share + norm[partner] * (1 - share)) * is_paired
    mixed_in = logits[partner] * (1 - share).float()
    return (logits * share.float()).add_(mixed_in).sub_(norm.float())


def penalize(logits: torch.Tensor, state: SamplerState, numbers: Numbers) -> None:
    """Apply the repetition, presence and frequency penalties to logits (n, v + 1) in place.

    Tokens count fully within the range, and less by 1 / unit for each token further back. A seen
    id becomes l / r or l * r, then loses the presence penalty, both as its newest token counts; and
    the frequency penalty for each of its tokens.
    """
    unit = numbers["repetition_decay"]
    ids = state.history[:, :-1].long()  # (n, m)
    back = state.counts[:, None] - _positions(ids)  # the newest is 1 back
    steps = torch.minimum(numbers["repetition_range"] - back, unit).clamp_min_(0).long()
    zeros = torch.zeros(2, *logits.shape, dtype=torch.int64, device=logits.device)
    newest = zeros[0].scatter_reduce_(1, ids, steps, "amax").gather(1, ids) / unit
    every = zeros[1].scatter_add_(1, ids, steps).gather(1, ids) / unit
    factor = (numbers["repetition_penalty"] - 1) * newest + 1
    seen = logits.gather(1, ids).double()
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    seen = seen - numbers["presence_penalty"] * newest - numbers["frequency_penalty"] * every
    logits.scatter_(1, ids, seen.clamp_max_(STRONGEST).float())


def penalize_repetitions(
    logits: torch.Tensor, state: SamplerState, numbers: Numbers, longest: int
) -> None:
    """Apply DRY to logits (n, v + 1) in place.

    L is the length of the longest suffix of the history that occurred before, within `dry_range`
    and without breakers, followed by an id that is not a breaker. Each such id x loses
    multiplier * base^(L - allowed) * count(x after that suffix).
    """
    assert state.breakers is not None
    ids, counts = state.history[:, :-1], state.counts[:, None]
    positions = _positions(ids)
    outside = counts - 1 - positions >= numbers["dry_range"]
    outside |= contains(state.breakers, ids.long())
    tokens = torch.where(outside, ~positions, ids)  # those outside equal no other token
    padded = pad(tokens, (longest - 1, 0), value=-(2**31))
    windows = padded.unfold(1, longest, 1)[:, :-1].mT  # (n, longest, m - 1)
    kind = torch.int8 if longest < 128 else torch.int16
    order = torch.arange(1, longest + 1, dtype=kind, device=logits.device)
    suffix = padded.gather(1, (counts - 2).clamp_min(-1) + order)
    differs = torch.empty(windows.shape, dtype=order.dtype, device=logits.device)
    torch.ne(windows, suffix[..., None], out=differs)  # laid out for the reduction
    differs = differs.mul_(order[:, None]).amax(1)
    lengths = torch.minimum(longest - differs, numbers["dry_max_ngram"])
    lengths = lengths.masked_fill(tokens[:, 1:] < 0, 0)
    length = lengths.amax(-1, keepdim=True)  # (n, 1)

    excess = length - numbers["dry_allowed_length"]
    growth = (numbers["dry_base"] ** excess).clamp_max(STRONGEST)
    penalty = (numbers["dry_multiplier"] * growth).clamp_max(STRONGEST).masked_fill(excess < 0, 0)
    after = ids[:, 1:].long()
    times = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    times = times.scatter_add_(1, after, (lengths == length).int()).gather(1, after)
    penalized = logits.gather(1, after) - penalty * torch.minimum(times, numbers["dry_counts"])
    logits.scatter_(1, after, penalized.float())


def contains(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return for ids int64 (n, c) whether masks (n, w) have them."""
    return (words.gather(1, ids >> 5) >> (ids & 31)) & 1 == 1


def without(words: torch.Tensor, width: int) -> torch.Tensor:
    """Return booleans (n, width), true for the ids that masks (n, w) do not have."""
    to_sign = torch.arange(31, -1, -1, dtype=torch.int32, device=words.device)
    return (words[:, :, None] << to_sign >= 0).flatten(1)[:, :width]


def _positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
