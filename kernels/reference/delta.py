"""The gated delta rule in torch: by chunks of 64 tokens, and token by token; states of slots.

Per value head with state S (key_dim, value_dim), for a token with query q, key k, value v, log of
the decay g and step β: S ← e^g S; δ = β (v - kᵀS); S ← S + k δᵀ; o = qᵀ S (Gated Delta Networks,
Yang et al. 2024). Chunks solve the δ of their tokens at once (section 3.2 there).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from exl2flow.kernels.interface.cache_formats import STEP_TOKENS
from exl2flow.kernels.interface.delta import (
    CHUNK_TOKENS,
    RING,
    DeltaArgs,
    DeltaSegment,
    DeltaSlots,
    DeltaState,
)

TINY = 1e-6  # added to squares of queries and keys


class DeltaInputs(NamedTuple):
    """Inputs of the rule, fp32 by value head: q and k (b, h, t, key_dim), v (b, h, t, value_dim).

    g: logs of decays, at most 0; beta: steps, both (b, h, t).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def gated_delta(
    x: torch.Tensor,
    qkv: torch.Tensor,
    z: torch.Tensor,
    args: DeltaArgs,
    state: DeltaState | None = None,
    *,
    in_chunks: bool = True,
) -> tuple[torch.Tensor, DeltaState]:
    """Return what the last product of a layer reads, (b, t, width) like z, and the texts' state.

    Args:
        x: normed hidden states (b, t, hidden).
        qkv: queries, keys and values before the convolution, (b, t, channels).
        z: what gates the outputs, (b, t, width).
        args: the layer.
        state: of the texts so far, which end at a multiple of 64 if `in_chunks`; None: none.
        in_chunks: use chunks of 64 tokens; else take token by token.
    """
    state = DeltaState.empty(args, len(x)) if state is None else state
    before = torch.cat([state.inputs, qkv.float()], dim=1)
    inputs = _inputs(x, _convolved(before, args.conv), args)
    rule = by_chunks if in_chunks else by_tokens
    outputs, after = rule(inputs, state.state)
    last = before[:, before.shape[1] - state.inputs.shape[1] :]
    return _gated(outputs, z, args), DeltaState(state=after, inputs=last)


def delta_step(
    x: torch.Tensor,
    qkv: torch.Tensor,
    z: torch.Tensor,
    args: DeltaArgs,
    slots: DeltaSlots,
    lengths: torch.Tensor,
    to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append tokens, up to `STEP_TOKENS`, to each of the first slots' texts.

    Return what `gated_delta` returns. Pending tokens that the lengths confirm enter the states; the
    new ones become pending. A step that is repeated with the same lengths changes nothing else.

    Args:
        x, qkv, z: of the new tokens, (b, t, …) as for `gated_delta`.
        args: the layer.
        slots: its states, which change.
        lengths: int32 (b,), tokens of each text before the new ones; at most `STEP_TOKENS` more
            than `behind`. A slot with fewer than those takes no part: only pending tokens change.
        to: int32 (width,), the place of each element in a token's result; None: its own.
    """
    batch, count = qkv.shape[:2]
    before = _catch_up(args, slots, lengths)
    joined = torch.cat([before, qkv.float()], dim=1)
    inputs = _inputs(x, _convolved(joined, args.conv), args)
    outputs, deltas, _ = _in_turn(inputs, slots.state[:batch])
    at = _positions(lengths, count, slots.inputs)
    ring, takes_part = slots.inputs[:batch], lengths == slots.behind[:batch, 0]
    new = ring.scatter(1, at % RING, qkv.to(ring.dtype))
    slots.inputs[:batch] = torch.where(takes_part[:, None, None], new, ring)
    slots.keys[:batch, :count] = inputs.k.transpose(1, 2)
    slots.deltas[:batch, :count] = deltas.transpose(1, 2)
    slots.decays[:batch, :count] = inputs.g.transpose(1, 2)
    y = _gated(outputs, z, args)
    return y if to is None else torch.empty_like(y).index_copy_(-1, to.long(), y)


def _catch_up(args: DeltaArgs, slots: DeltaSlots, lengths: torch.Tensor) -> torch.Tensor:
    """Apply pending tokens up to the lengths; return the inputs before those, fp32 (b, 3, …)."""
    batch, last = len(lengths), args.conv.shape[1] - 1
    behind, state = slots.behind[:batch, 0], slots.state[:batch]
    pending = (lengths - behind).clamp(0, STEP_TOKENS)
    for i in range(STEP_TOKENS if lengths.is_cuda else int(pending.max())):
        after = state * slots.decays[:batch, i].exp()[..., None, None]
        after = after + slots.keys[:batch, i][..., None] * slots.deltas[:batch, i][..., None, :]
        is_applied, at = pending > i, behind + i + 1
        state = torch.where(is_applied[:, None, None, None], after, state)
        is_border = is_applied & (at % slots.page_tokens == 0)
        for kept, new in (
            (slots.aside, state),
            (slots.aside_inputs, _rows_before(slots.inputs, at, last)),
            (slots.aside_at, at),
        ):
            chosen = is_border.view(-1, *[1] * (new.ndim - 1))
            kept[:batch] = torch.where(chosen, new, kept[:batch])
    slots.state[:batch] = state
    slots.behind[:batch] = torch.maximum(behind, lengths)[:, None]
    return _rows_before(slots.inputs, lengths, last).float()


def _positions(begins: torch.Tensor, count: int, ring: torch.Tensor) -> torch.Tensor:
    """Return positions `begins` (b,) on for each element of a ring's rows, int64 (b, count, …)."""
    at = begins[:, None].long() + torch.arange(count, device=begins.device)
    return at[..., None].expand(-1, -1, ring.shape[-1])


def _rows_before(ring: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last rows before positions `ends` (b,) of the first slots, (b, count, …)."""
    at = _positions(ends - count, count, ring)
    return ring[: len(ends)].gather(1, at % RING).masked_fill(at < 0, 0)


def delta_scan(
    x: torch.Tensor,
    qkv: torch.Tensor,
    z: torch.Tensor,
    args: DeltaArgs,
    slots: DeltaSlots,
    segments: Sequence[DeltaSegment],
) -> torch.Tensor:
    """Read tokens of prompts; return what `gated_delta` returns for them, (1, t, width).

    Chunks begin at multiples of 64 positions; tokens before the first one go in turn. No token is
    pending afterwards.

    Args:
        x, qkv, z: of all segments, (1, t, …) as for `gated_delta`.
        args: the layer.
        slots: its states, which change; those of a segment include all tokens before it.
        segments: of different slots.
    """
    outputs = [_scan(x, qkv, args, slots, segment) for segment in segments]
    return _gated(torch.cat(outputs, dim=2), z, args)


def _scan(
    x: torch.Tensor, qkv: torch.Tensor, args: DeltaArgs, slots: DeltaSlots, segment: DeltaSegment
) -> torch.Tensor:
    """Return the outputs of a segment, (1, h, t, value_dim)."""
    slot, begin, end = segment.slot, segment.begin, segment.begin + segment.count
    tokens, last = slice(segment.start, segment.start + segment.count), args.conv.shape[1] - 1
    state, ring = slots.state[slot : slot + 1], slots.inputs[slot]
    if not begin:
        state = torch.zeros_like(state)
        slots.aside_at[slot].fill_(0)
    places = range(begin - last, begin)
    rows = [ring[at % RING] if at >= 0 else torch.zeros_like(ring[0]) for at in places]
    joined = torch.cat([torch.stack(rows)[None].float(), qkv[:, tokens].float()], dim=1)
    inputs = _inputs(x[:, tokens], _convolved(joined, args.conv), args)
    border = end - end % slots.page_tokens
    cuts = {begin, min(end, -(-begin // CHUNK_TOKENS) * CHUNK_TOKENS), max(begin, border), end}
    outputs = list[torch.Tensor]()
    for first, then in pairwise(sorted(cuts)):
        part = DeltaInputs(*(y[:, :, first - begin : then - begin] for y in inputs))
        rule = by_tokens if first % CHUNK_TOKENS else by_chunks
        of_part, state = rule(part, state)
        outputs.append(of_part)
        if then == border:
            slots.aside[slot] = state[0]
            slots.aside_inputs[slot] = joined[0, then - begin : then - begin + last]
            slots.aside_at[slot].fill_(then)
    slots.state[slot] = state[0]
    for at, row in zip(range(end - last, end), joined[0, -last:], strict=True):
        ring[at % RING] = row
    slots.behind[slot].fill_(end)
    return torch.cat(outputs, dim=2)


def _gated(outputs: torch.Tensor, z: torch.Tensor, args: DeltaArgs) -> torch.Tensor:
    """Return outputs (b, h, t, value_dim), normed by head and gated, (b, t, width) like z."""
    y = outputs.transpose(1, 2)
    normed = y * (y.square().mean(-1, keepdim=True) + args.eps).rsqrt() * args.norm
    return (normed.flatten(2) * functional.silu(z.float())).to(z.dtype)


def _convolved(before: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the causal convolution of each channel.

    Args:
        before: (b, taps - 1 + t, channels).
        weights: (channels, taps).
    """
    taps = weights.shape[1]
    count = before.shape[1] - taps + 1
    y = before[:, :count] * weights[:, 0]
    for tap in range(1, taps):
        y = y + before[:, tap : tap + count] * weights[:, tap]
    return functional.silu(y)


def _inputs(x: torch.Tensor, convolved: torch.Tensor, args: DeltaArgs) -> DeltaInputs:
    width, repeats = args.key_heads * args.key_dim, args.value_heads // args.key_heads
    q, k, v = torch.split(convolved, [width, width, convolved.shape[-1] - 2 * width], dim=-1)
    q, k = (_heads(y, args.key_heads) for y in (q, k))
    q, k = (y * (y.square().sum(-1, keepdim=True) + TINY).rsqrt() for y in (q, k))
    q, k = (y.repeat_interleave(repeats, dim=1) for y in (q * args.key_dim**-0.5, k))
    beta, step = functional.linear(x.float(), args.maps).transpose(1, 2).chunk(2, dim=1)
    g = args.decay[:, None] * functional.softplus(step + args.step[:, None])
    return DeltaInputs(q, k, _heads(v, args.value_heads), g, beta.sigmoid())


def _heads(y: torch.Tensor, heads: int) -> torch.Tensor:
    """Split (b, t, h · d) into (b, h, t, d)."""
    return y.reshape(*y.shape[:-1], heads, -1).transpose(1, 2)


def by_tokens(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (b, h, t, value_dim) and the state behind them, token by token."""
    outputs, _, after = _in_turn(inputs, state)
    return outputs, after


def _in_turn(
    inputs: DeltaInputs, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and δ, (b, h, t, value_dim) each, and the state behind them."""
    outputs, deltas = list[torch.Tensor](), list[torch.Tensor]()
    for t in range(inputs.q.shape[2]):
        q, k, v, g, beta = (y[:, :, t] for y in inputs)
        state = state * g.exp()[..., None, None]
        deltas.append(beta[..., None] * (v - (k[..., None] * state).sum(-2)))
        state = state + k[..., None] * deltas[-1][..., None, :]
        outputs.append((q[..., None] * state).sum(-2))
    return torch.stack(outputs, dim=2), torch.stack(deltas, dim=2), state


def by_chunks(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as `by_tokens` up to rounding; chunks begin where the inputs do."""
    count = inputs.q.shape[2]
    q, k, v, g, beta = (_chunked(y) for y in inputs)
    total = g.cumsum(-1)  # log of the decay since the chunk began, (b, h, chunks, 64)
    later = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = (k * beta[..., None]) @ k.mT * between
    known = torch.cat([v * beta[..., None], k * (beta * total.exp())[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, by_state = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    scores, far = q @ k.mT * between, q * total.exp()[..., None]
    kept = k * (total[..., -1:] - total).exp()[..., None]
    faded, outputs = total[..., -1].exp(), list[torch.Tensor]()
    for i in range(q.shape[2]):
        delta = own[:, :, i] - by_state[:, :, i] @ state
        outputs.append(far[:, :, i] @ state + scores[:, :, i] @ delta)
        state = state * faded[:, :, i, None, None] + kept[:, :, i].mT @ delta
    return torch.cat(outputs, dim=2)[:, :, :count], state


def _chunked(y: torch.Tensor) -> torch.Tensor:
    """Divide tokens (b, h, t, …) into chunks (b, h, chunks, 64, …), padded by zeros."""
    missing = -y.shape[2] % CHUNK_TOKENS
    if missing:
        y = torch.cat([y, y.new_zeros(*y.shape[:2], missing, *y.shape[3:])], dim=2)
    return y.reshape(*y.shape[:2], -1, CHUNK_TOKENS, *y.shape[3:])
