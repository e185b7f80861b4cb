"""Positions at which a step samples: after the last token of each slot and each draft token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from exl2flow.engine.drafts.costs import DRAFTED_ROWS
from exl2flow.kernels import on_device


class DraftPositions:
    """Logits, draws and draft tokens by position; the device advances from one to the next.

    logits: fp32 (slots, v), at the current position; position: int64 (1,), its number.
    """

    def __init__(self, slots: int, width: int, drafts: int, device: torch.device) -> None:
        """Reserve memory for at most `drafts` draft tokens per slot."""
        self.logits = torch.full((slots, width), -torch.inf, device=device)
        rows = min(drafts * slots, DRAFTED_ROWS)  # of draft positions, one after the other
        self._draft_logits = torch.full((rows, width), -torch.inf, device=device)
        self._draws = torch.zeros(1 + drafts, slots, dtype=torch.float64, device=device)
        self._drafted = torch.zeros(drafts, slots, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)

    def prepare(self, draws: Sequence[Sequence[float]]) -> None:
        """Set draws (positions, slots)."""
        values = on_device(torch.tensor(draws, dtype=torch.float64), self._draws.device)
        self._draws[: len(draws), : values.shape[1]] = values

    def verify(self, counts: Sequence[int], ids: torch.Tensor) -> None:
        """Set how many draft tokens each slot has, of ids int64 (slots, 1 + drafts).

        The first of these is the last token of a slot; its draft tokens come behind it.
        """
        ends = on_device(torch.tensor(counts), ids.device)[:, None]
        is_drafted = torch.arange(max(counts), device=ids.device) < ends
        slots, most = is_drafted.shape
        self._drafted[:most, :slots] = ids[:slots, 1 : 1 + most].where(is_drafted, -1).T

    def put(self, logits: torch.Tensor) -> None:
        """Store the logits (slots, positions, v) of a forward pass; a head may lack some ids."""
        slots, count, width = logits.shape
        self.logits[:slots, :width] = logits[:, 0]
        if count > 1:
            drafted = logits[:, 1:].transpose(0, 1).flatten(0, 1)
            self._draft_logits[: len(drafted), :width] = drafted

    def begin(self) -> None:
        """Go to the first position."""
        self.position.zero_()

    def advance(self, ids: torch.Tensor, active: torch.Tensor) -> None:
        """Go to the next position; slots stay active (n,) whose ids (n,) are the draft's.

        n: as many slots as the pass had whose logits were put.
        """
        slots, last = len(ids), len(self._drafted) - 1
        index = self.position.clamp(max=last)  # a recording goes on more often
        active *= ids == self._drafted[:, :slots][index][0]
        rows = index * slots + torch.arange(slots, device=index.device)
        self.logits[:slots] = self._draft_logits[rows.clamp(max=len(self._draft_logits) - 1)]
        torch.add(index, 1, out=self.position)

    def draws(self, slots: int) -> torch.Tensor:
        """Return the draws fp64 (slots,) of this position."""
        return self._draws[:, :slots][self.position][0]

    @contextmanager
    def idle(self, active: torch.Tensor) -> Iterator[None]:
        """Let no slot advance in the block; its writes to the cache are overwritten later."""
        with restored(active), restored(self.position):
            active.zero_()
            yield


@contextmanager
def restored(x: torch.Tensor) -> Iterator[None]:
    """Restore a tensor after the block."""
    saved = x.clone()
    try:
        yield
    finally:
        x.copy_(saved)
