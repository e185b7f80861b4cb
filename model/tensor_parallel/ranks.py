"""Ranks: the processes that run one model together, and what they exchange."""

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar, Self

import torch
from torch import distributed

from exl2flow.core.errors import BackendUnavailable, InferenceError
from exl2flow.model.tensor_parallel.peers import PeerExchange

SEED_BITS = 63
PATIENCE = timedelta(minutes=5)  # with a rank that is alive; the loss of one is seen at once


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `count` processes, all of which make the same calls in the same order.

    A context manager, which leaves the others: a process that ends without that may abort.
    is_recordable: whether collectives may be part of a CUDA graph; seeds: of texts that are given
    none, the same on all ranks; like the group that `torch.distributed` makes, they are those of
    the process. peers: exchanges of few rows, where that is faster than `torch.distributed`.
    """

    rank: int
    count: int
    is_recordable: bool = False
    peers: PeerExchange | None = None
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
    ) -> Self:
        """Meet the others; by default as `torchrun` says.

        Args:
            init_method: see `torch.distributed`.
            rank: of this process.
            count: of all.
            device: the GPU of this process; None: it computes on the CPU.
            backend: of `torch.distributed`; None: NCCL for GPUs, else gloo.

        Raises:
            BackendUnavailable: they do not meet.
            InferenceError: one is lost at once.
        """
        if not distributed.is_initialized():
            try:
                distributed.init_process_group(
                    backend or ("gloo" if device is None else "nccl"),
                    init_method=init_method,
                    rank=rank,
                    world_size=count,
                    timeout=PATIENCE,
                    device_id=device if backend is None else None,
                )
            except (RuntimeError, ValueError) as error:
                raise BackendUnavailable(
                    f"the ranks of a model did not meet: {error}; start each with `torchrun`"
                ) from error
        is_nccl = distributed.get_backend() == "nccl"
        ranks = cls(distributed.get_rank(), distributed.get_world_size(), is_recordable=is_nccl)
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
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def check(self) -> None:
        """Raise `InferenceError` if a recorded exchange has waited for another rank in vain."""
        if self.peers is not None:
            self.peers.check()

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

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, fp32, in their order, so it is equal on all of them."""
        first, *others = self._all(x.float().contiguous())
        for part in others:
            first += part
        return first

    def _peers_for(self, size: int) -> PeerExchange | None:
        """Return the peers if they exchange so many bytes."""
        is_small = self.peers is not None and self.peers.takes(size // 4)
        return self.peers if is_small else None

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor of each rank, of one shape."""
        if x.is_cuda and not self.is_recordable:  # gloo gathers in main memory
            return [part.to(x.device) for part in self._all(x.cpu())]
        parts = [torch.empty_like(x) for _ in range(self.count)]
        gather: Callable[..., object] = distributed.all_gather
        try:
            gather(parts, x)
        except RuntimeError as error:
            raise InferenceError(
                f"rank {self.rank} lost another one of {self.count}: {error}; start all again"
            ) from error
        return parts
