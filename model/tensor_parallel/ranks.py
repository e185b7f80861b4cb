"""Ranks: the processes that run one model together, and what they exchange."""

import random
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch

from exl2flow.core.errors import BackendUnavailable, InferenceError
from exl2flow.core.runtime.ranks import group_of, meet
from exl2flow.model.tensor_parallel.peers import PeerExchange

SEED_BITS = 63
PATIENCE = timedelta(minutes=5)  # with a rank that is alive; the loss of one is seen at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `count` processes, all of which make the same calls in the same order.

    A context manager, which leaves the others: a process that ends without that may abort.
    is_recordable: whether collectives may be part of a CUDA graph; peers: exchanges of few rows,
    where that is faster than `torch.distributed`; is_led: whether rank 0 alone knows the texts;
    guard: called before each exchange, to refuse one that the others do not make; group: a backend
    of `torch.distributed`; seeds: of texts that are given none, the same on all ranks of a process.
    """

    rank: int
    count: int
    is_recordable: bool = False
    peers: PeerExchange | None = None
    group: Any = None
    is_led: bool = False
    guard: Callable[[], None] | None = None
    seeds: ClassVar[random.Random] = random.SystemRandom()

    @classmethod
    def new_seed(cls) -> int:
        """Return a seed for a text."""
        return cls.seeds.getrandbits(SEED_BITS)

    @classmethod
    def join(
        cls,
        init_method: str = "env://",
        *,
        rank: int = -1,
        count: int = -1,
        device: torch.device | None = None,
        backend: str | None = None,
        is_led: bool = False,
    ) -> Self:
        """Meet the others; by default as `torchrun` says.

        Args:
            init_method: see `torch.distributed`.
            rank: of this process.
            count: of all.
            device: the GPU of this process; None: it computes on the CPU.
            backend: of `torch.distributed`; None: NCCL for GPUs, else gloo.
            is_led: see `Ranks`.

        Raises:
            BackendUnavailable: they do not meet.
            InferenceError: one is lost at once.
        """
        is_nccl = (backend or ("gloo" if device is None else "nccl")) == "nccl"
        try:
            store, rank, count = meet(init_method, rank, count, PATIENCE, is_led=is_led)
            group = group_of(store, rank, count, PATIENCE, is_nccl=is_nccl)
        except (RuntimeError, ValueError) as error:
            raise BackendUnavailable(
                f"the ranks of a model did not meet: {error}; start each with `torchrun`"
            ) from error
        ranks = cls(rank, count, is_recordable=is_nccl, is_led=is_led, group=group)
        where = device if is_nccl else None
        drawn = torch.tensor([secrets.randbits(SEED_BITS)], device=where)
        cls.seeds = random.Random(int(ranks._all(drawn)[0]))
        if not is_nccl or device is None or ranks.count == 1:
            return ranks
        peers = PeerExchange.meet(ranks.rank, ranks.count, device, ranks._all)
        return replace(ranks, peers=peers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        type(self).seeds = random.SystemRandom()
        if self.peers is not None:
            self.peers.close()
        if self.is_recordable:
            self.group.shutdown()

    def check(self) -> None:
        """Raise `InferenceError` if a recorded exchange has waited for another rank in vain."""
        if self.peers is not None:
            self.peers.check()

    def abort(self) -> None:
        """Let what waits for others that are lost end; any thread may call this."""
        type(self).seeds = random.SystemRandom()
        if self.peers is not None:
            self.peers.boxes.abort()
        if self.is_recordable:  # it ends kernels at once, but waits until recordings are gone
            threading.Thread(target=self.group.abort, daemon=True).start()

    def gather(
        self, x: torch.Tensor, widths: Sequence[int], to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the columns of all ranks, (…, Σ widths), of this rank's own, (…, width).

        to: where each column goes, int32 (Σ widths,), if x is fp16; None: in order.
        """
        rows, most = x.flatten(0, -2), max(widths)
        peers = self._peers_for(len(rows) * most * x.element_size())
        if peers is not None and all(width * x.element_size() % 4 == 0 for width in widths):
            return peers.gather(rows, widths, to).view(*x.shape[:-1], -1)
        sent = torch.nn.functional.pad(rows, (0, most - rows.shape[1])).contiguous()
        columns = [part[:, :width] for part, width in zip(self._all(sent), widths, strict=True)]
        y = torch.cat(columns, dim=1).view(*x.shape[:-1], -1)
        return y if to is None else torch.empty_like(y).index_copy_(-1, to.long(), y)

    def added(
        self, x: torch.Tensor, hidden: torch.Tensor | None = None, multiplier: float = 1.0
    ) -> torch.Tensor:
        """Return hidden + multiplier · Σ x over all ranks, fp16 in the shape of x.

        Args:
            x: this rank's part, fp32; the sum is in the order of ranks, so equal on all of them.
            hidden: fp16 in its shape; or None.
            multiplier: of the sum.
        """
        peers = self._peers_for(x.numel() * x.element_size())
        if peers is not None:
            return peers.added(x, hidden, multiplier)
        total = self.sum(x)
        if multiplier != 1.0:
            total = total * multiplier
        return (total if hidden is None else hidden + total).half()

    def bring(self, x: torch.Tensor) -> None:
        """Overwrite a tensor, whose elements have 4 or 8 bytes, with that of rank 0."""
        words = x.numel() * x.element_size() // 4
        if (peers := self._peers_for(4 * words)) is not None:
            own = x.contiguous().view(torch.int32).view(1, -1)
            first = peers.gather(own, [words] * self.count)[0, :words]
            x.copy_(first.view(x.dtype).view(x.shape))
        elif self.is_recordable:
            self.group.broadcast([x]).wait()
        else:
            x.copy_(self._all(x)[0])

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, fp32, in their order, so it is equal on all of them."""
        first, *others = self._all(x.float().contiguous())
        for part in others:
            first += part
        return first

    def _peers_for(self, size: int) -> PeerExchange | None:
        """Return the peers if they exchange this many bytes."""
        if self.guard is not None:
            self.guard()
        is_small = self.peers is not None and self.peers.takes(size // 4)
        return self.peers if is_small else None

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor of each rank, of one shape."""
        if self.guard is not None:
            self.guard()
        if x.is_cuda and not self.is_recordable:  # gloo gathers in main memory
            return [part.to(x.device) for part in self._all(x.cpu())]
        parts = [torch.empty_like(x) for _ in range(self.count)]
        try:
            self.group.allgather([parts], [x]).wait()
        except RuntimeError as error:
            raise InferenceError(
                f"rank {self.rank} lost another one of {self.count}: {error}; start all again"
            ) from error
        return parts
