"""Sampling on a GPU: at most five launches, and a sort where all candidates matter."""

from functools import partial

import numpy as np
import torch

from exl2flow.kernels import torch_sampler
from exl2flow.kernels.compiler import (
    COUNT_THREADS,
    COUNTED,
    PIECE,
    SELECT_THREADS,
    STRETCH,
    TEAM,
    launch,
    limits,
)
from exl2flow.kernels.product import filled
from exl2flow.kernels.sampler_ops import Sampled, SamplerState, SamplerSteps

MOST_FEW = 1024  # candidates that one CTA handles in shared memory
FEW_BYTES = 56  # of a candidate there
SEEN_BYTES = 16  # of an id whose occurrences are counted
WIDE_THREADS, SEARCH_THREADS = 1024, 256
WIDTHS = {"allowed": "words", "ignored": "words", "breakers": "breaker_words", "bias": "width"}
CALL = np.dtype(
    [
        (name, np.uint64)
        for name in (
            *("logits", "table", "draws", "history", "counts", "active", "mu", "partner", "lead"),
            *("allowed", "breakers", "ignored", "bias", "norms", "lengths", "longest", "adjusted"),
            *("flags", "keys", "ordered", "order", "scratch", "partial", "meetings"),
            *("ids", "top_ids", "probabilities", "top_probabilities"),
        )
    ]
    + [
        (name, np.int64)
        for name in (
            *("rows", "vocab", "step", "words", "breaker_words", "width", "room", "pieces"),
            *("flagged", "stretches", "most", "top", "penalizes", "mixes"),
        )
    ]
)


def sample(
    logits: torch.Tensor, state: SamplerState, draws: torch.Tensor, steps: SamplerSteps
) -> Sampled:
    """See `Ops.sample`."""
    n, vocab, device = len(logits), state.vocab_size, logits.device
    most = min(steps.most or vocab, vocab)
    top, pieces = min(steps.top, most), -(-vocab // PIECE)
    is_few = most <= MOST_FEW
    adjusts = steps.adjusts or not is_few
    new = partial(torch.empty, device=device)
    call = np.zeros(1, CALL)[0]
    for name in ("allowed", "ignored", "breakers", "bias"):
        tensor = getattr(state, name)
        if tensor is not None:
            filled(call, **{name: tensor, WIDTHS[name]: tensor.shape[1]})
    ids, probabilities = new(n, dtype=torch.int64), new(n, dtype=torch.float64)
    top_ids, shares = new(n, top, dtype=torch.int64), new(n, top, dtype=torch.float64)
    flags = new(n, -(-vocab // COUNTED) if adjusts else pieces, dtype=torch.int32)
    filled(
        call, logits=logits, table=state.table, draws=draws, history=state.history,
        counts=state.counts, active=state.active, mu=state.mu, partner=state.partner,
        lead=state.lead, ids=ids, probabilities=probabilities, top_ids=top_ids,
        top_probabilities=shares, rows=n, vocab=vocab, step=logits.stride(0), pieces=pieces,
        room=state.history.shape[1] - 1, most=most, top=top, penalizes=steps.penalties,
        mixes=steps.cfg, flags=flags, flagged=flags.shape[1],
    )  # fmt: skip
    run = partial(_run, call, device)
    if adjusts:
        adjusted, *others = _adjust(call, run, state, steps)
    if is_few:
        keys = new(n, pieces, most, dtype=torch.int64)
        filled(call, keys=keys)
        run("logits.cu", "select_likeliest", (pieces, n), threads=SELECT_THREADS)
        room = 1 << (most - 1).bit_length()
        threads = 128 if most == 1 else 256 if most <= 256 else WIDE_THREADS
        run("choose.cu", "choose_few", (n,), threads=threads, shared=FEW_BYTES * room)
    else:
        order, ordered = (x.contiguous() for x in torch_sampler.rank(adjusted, steps.most))
        teams = max(1, min(n, limits(device.index)[0] // TEAM))
        scratch, told = new(teams, 5, most, dtype=torch.float64), new(teams, 6, TEAM, dtype=torch.float64)
        meetings = torch.zeros(teams, dtype=torch.int32, device=device)
        filled(
            call, order=order, ordered=ordered, scratch=scratch, partial=told, meetings=meetings
        )
        run("choose.cu", "choose_all", (TEAM, teams), threads=WIDE_THREADS, together=True)
    return Sampled(
        ids=ids,
        probabilities=probabilities if steps.probabilities else None,
        top_ids=top_ids if top else None,
        top_probabilities=shares if top else None,
    )


def _adjust(call, run, state: SamplerState, steps: SamplerSteps) -> list[torch.Tensor]:
    """Launch what changes logits; return these, and what must not be freed before the rest."""
    n, vocab, device = len(state.counts), state.vocab_size, state.counts.device
    new = partial(torch.empty, device=device)
    pieces = -(-vocab // PIECE)
    kept = [new(n, vocab)]
    filled(call, adjusted=kept[0])
    if steps.cfg:
        kept.append(new(n, pieces, 2, dtype=torch.float64))
        filled(call, norms=kept[-1])
        run("logits.cu", "norms", (pieces, n), threads=SELECT_THREADS)
    if steps.dry:
        room = state.history.shape[1] - 1
        stretches = -(-room // STRETCH)
        lengths = new(n, room, dtype=torch.int16)
        longest = new(n, stretches, dtype=torch.int32)
        kept += [lengths, longest]
        filled(call, lengths=lengths, longest=longest, stretches=stretches)
        run("logits.cu", "find_repetitions", (stretches, n), threads=SEARCH_THREADS)
    shared = COUNTED * SEEN_BYTES if steps.penalties or steps.dry else 0
    run("logits.cu", "adjust", (-(-vocab // COUNTED), n), threads=COUNT_THREADS, shared=shared)
    return kept


def _run(call: np.void, device: torch.device, file: str, name: str, grid, **how) -> None:
    launch(file, name, grid, call, device=device, early=True, **how)
