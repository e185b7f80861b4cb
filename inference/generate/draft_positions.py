"""Where a step samples: behind the last token of each slot, and behind each drafted one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from exl2flow.kernels import on_device


class DraftPositions:
    """Logits, draws and drafted ids of the places of a step; the device counts through them.

    logits: fp32 (slots, v), where the next sample is taken; place: int64 (1,), which that is.
    """

    def __init__(self, slots: int, width: int, drafts: int, device: torch.device) -> None:
        """Take at most `drafts` drafted tokens per slot."""
        self.logits = torch.full((slots, width), -torch.inf, device=device)
        self._behind = torch.full((drafts, slots, width), -torch.inf, device=device)
        self._draws = torch.zeros(1 + drafts, slots, dtype=torch.float64, device=device)
        self._drafted = torch.zeros(drafts, slots, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)

    def prepare(
        self, draws: Sequence[Sequence[float]], drafted: Sequence[Sequence[int]] = ()
    ) -> None:
        """Set draws (places, slots), and drafted ids (places - 1, slots), -1 where none is."""
        for there, rows in ((self._draws, draws), (self._drafted, drafted)):
            if rows:
                values = on_device(torch.tensor(rows, dtype=there.dtype), there.device)
                there[: len(rows), : values.shape[1]] = values

    def put(self, logits: torch.Tensor) -> None:
        """Store the logits (rows, places, v) of a forward pass; a head may lack some ids."""
        rows, count, width = logits.shape
        self.logits[:rows, :width] = logits[:, 0]
        if count > 1:
            self._behind[: count - 1, :rows, :width] = logits[:, 1:].transpose(0, 1)

    def begin(self) -> None:
        """Go to the first place."""
        self.place.zero_()

    def go_on(self, ids: torch.Tensor, active: torch.Tensor) -> None:
        """Go to the next place; slots stay active (n,) whose sampled ids (n,) were drafted."""
        rows, last = len(ids), len(self._drafted) - 1
        here = self.place.clamp(max=last)  # a recording goes on more often
        active *= ids == self._drafted[:, :rows][here][0]
        self.logits[:rows] = self._behind[:, :rows][here][0]
        torch.add(here, 1, out=self.place)

    def draws(self, rows: int) -> torch.Tensor:
        """Return the draws fp64 (rows,) of this place."""
        return self._draws[:, :rows][self.place][0]

    @contextmanager
    def idle(self, active: torch.Tensor) -> Iterator[None]:
        """Let no slot advance in the block; what it writes to the cache is written again later."""
        with restored(active), restored(self.place):
            active.zero_()
            yield


@contextmanager
def restored(x: torch.Tensor) -> Iterator[None]:
    """Undo what the block does to a tensor."""
    kept = x.clone()
    try:
        yield
    finally:
        x.copy_(kept)
