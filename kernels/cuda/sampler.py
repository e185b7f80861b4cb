"""Sampling on a GPU: at most five launches, and a sort where more than 1024 candidates matter."""

from typing import Any

import numpy as np
import torch

from exl2flow.kernels.cuda.compiler import (
    COUNT_THREADS,
    COUNTED,
    PIECE,
    SELECT_THREADS,
    STRETCH,
    TEAM,
    LaunchRefused,
    launch,
    limits,
    tell_refusal,
)
from exl2flow.kernels.interface.sampling import SampledTokens, SamplerState, SamplerSteps
from exl2flow.kernels.plans.sources import filled, struct
from exl2flow.kernels.reference import sampler as torch_sampler

MOST_FEW = 1024  # candidates that one CTA handles in shared memory
FEW_BYTES = 56  # of a candidate there
SEEN_BYTES = struct("logits.cu", "Seen").itemsize  # of an id whose occurrences are counted
SEARCH_THREADS, WIDE_THREADS = 256, 1024
WIDTHS = {"allowed": "words", "ignored": "words", "breakers": "breaker_words", "bias": "width"}
CALL = struct("sampler.cuh", "Sampler")


def sample(
    logits: torch.Tensor, state: SamplerState, draws: torch.Tensor, steps: SamplerSteps
) -> SampledTokens:
    """See `Ops.sample`; its torch version runs if the device has no room for a team of CTAs."""
    n, vocab = len(logits), state.vocab_size
    most = min(steps.most or vocab, vocab)
    top, is_few = min(steps.top, most), most <= MOST_FEW
    call = _SampleCall(logits.device)
    call.set(
        logits=logits,
        table=state.table,
        draws=draws,
        history=state.history,
        counts=state.counts,
        active=state.active,
        mu=state.mu,
        partner=state.partner,
        lead=state.lead,
        rows=n,
        vocab=vocab,
        step=logits.stride(0),
        room=state.history.shape[1] - 1,
        most=most,
        top=top,
        pieces=-(-vocab // PIECE),
        penalizes=steps.penalties,
        mixes=steps.cfg,
    )
    for name, width in WIDTHS.items():
        tensor = getattr(state, name)
        if tensor is not None:
            call.set(**{name: tensor, width: tensor.shape[1]})
    ids = call.new("ids", n, dtype=torch.int64)
    probabilities = call.new("probabilities", n, dtype=torch.float64)
    top_ids = call.new("top_ids", n, top, dtype=torch.int64)
    shares = call.new("top_probabilities", n, top, dtype=torch.float64)
    adjusted = _adjust(call, state, steps) if steps.adjusts or not is_few else None
    if is_few:
        _choose_few(call, n, vocab, most, is_adjusted=adjusted is not None)
    else:
        assert adjusted is not None
        if not _choose_all(call, adjusted, most):
            return torch_sampler.sample(logits, state, draws, steps)
    return SampledTokens(
        ids=ids,
        probabilities=probabilities if steps.probabilities else None,
        top_ids=top_ids if top else None,
        top_probabilities=shares if top else None,
    )


class _SampleCall:
    """The argument of all kernels, and the tensors that it points to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._struct = np.zeros(1, CALL)[0]
        self._held: list[object] = []  # what is freed may be overwritten by a later launch

    def set(self, **values: torch.Tensor | int) -> None:
        """Set fields."""
        filled(self._struct, **values)
        self._held.append(values)

    def new(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Set a field to a new tensor."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.set(**{name: tensor})
        return tensor

    def run(self, file: str, name: str, grid: tuple[int, ...], **how: Any) -> None:
        """Launch a kernel."""
        launch(file, name, grid, self._struct, device=self.device, **how)


def _adjust(call: _SampleCall, state: SamplerState, steps: SamplerSteps) -> torch.Tensor:
    """Launch what changes logits, and return them."""
    n, vocab, room = len(state.counts), state.vocab_size, state.history.shape[1] - 1
    adjusted = call.new("adjusted", n, vocab, dtype=torch.float32)
    parts = -(-vocab // COUNTED)
    call.set(flagged=parts)
    call.new("flags", n, parts, dtype=torch.int32)
    if steps.cfg:
        pieces = -(-vocab // PIECE)
        call.new("norms", n, pieces, 2, dtype=torch.float64)
        call.run("logits.cu", "norms", (pieces, n), threads=SELECT_THREADS)
    if steps.dry:
        stretches = -(-room // STRETCH)
        call.set(stretches=stretches)
        call.new("lengths", n, room, dtype=torch.int16)
        call.new("longest", n, stretches, dtype=torch.int32)
        call.run("logits.cu", "find_repetitions", (stretches, n), threads=SEARCH_THREADS)
    shared = COUNTED * SEEN_BYTES if steps.penalties or steps.dry else 0
    call.run("logits.cu", "adjust", (parts, n), threads=COUNT_THREADS, shared=shared)
    return adjusted


def _choose_few(call: _SampleCall, n: int, vocab: int, most: int, *, is_adjusted: bool) -> None:
    """Select candidates from each piece of the vocabulary, then one CTA per row does the rest."""
    pieces, room = -(-vocab // PIECE), 1 << (most - 1).bit_length()
    if not is_adjusted:
        call.set(flagged=pieces)
        call.new("flags", n, pieces, dtype=torch.int32)
    call.new("keys", n, pieces, most, dtype=torch.int64)
    call.run("select.cu", "select_likeliest", (pieces, n), threads=SELECT_THREADS)
    threads = 128 if most == 1 else 256 if most <= 256 else WIDE_THREADS
    call.run("choose.cu", "choose_few", (n,), threads=threads, shared=FEW_BYTES * room)


_MOST_TEAMS: dict[torch.device, int] = {}  # that are resident together, after a refused launch


def _choose_all(call: _SampleCall, adjusted: torch.Tensor, most: int) -> bool:
    """Sort, then teams of CTAs take row by row; return whether a team has room on the device."""
    order, ordered = torch_sampler.rank(adjusted, most)
    call.set(order=order.contiguous(), ordered=ordered.contiguous())
    reported = max(1, limits(call.device.index)[0] // TEAM)
    teams = min(len(adjusted), _MOST_TEAMS.get(call.device, reported))
    while teams:
        call.set(meetings=torch.zeros(teams, dtype=torch.int32, device=call.device))
        call.new("scratch", teams, 5, most, dtype=torch.float64)
        call.new("partial", teams, 6, TEAM, dtype=torch.float64)
        try:
            call.run("choose.cu", "choose_all", (TEAM, teams), threads=WIDE_THREADS, together=True)
        except LaunchRefused as refusal:
            teams //= 2
            _MOST_TEAMS[call.device] = teams
            instead = "fewer teams of CTAs" if teams else "the torch version"
            tell_refusal("choose.cu", refusal.reason, instead)
        else:
            return True
    return False
