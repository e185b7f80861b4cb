"""Ranks: the processes that work together, and how tensors and words go between them."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from threading import Thread
from typing import Any, Self

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from exl2flow.core.errors import BackendUnavailable
from exl2flow.core.options.environment import survive_lost_ranks

CPU = torch.device("cpu")
PIECES = 4  # of the rows of a sum; each is summed by one rank, so no more ranks than these share it
PATIENCE = timedelta(hours=12)  # with a rank that works; the loss of one is seen at once


def meet(
    init_method: str, rank: int, count: int, patience: timedelta, *, is_led: bool = False
) -> tuple[Any, int, int]:
    """Return the store in which ranks meet, this one's number and how many they are.

    Args:
        init_method: see `torch.distributed`.
        rank: of this process; -1: as `torchrun` says.
        count: of all; -1: likewise.
        patience: with the others.
        is_led: whether rank 0 has to survive the loss of another.
    """
    store, rank, count = next(rendezvous(init_method, rank, count, timeout=patience))
    store.set_timeout(patience)
    if is_led:
        survive_lost_ranks()
    return store, rank, count


def group_of(store: Any, rank: int, count: int, patience: timedelta, *, is_nccl: bool) -> Any:
    """Return ranks that meet in a store, apart from the group that `torch.distributed` may have."""
    if not is_nccl:
        return distributed.ProcessGroupGloo(store, rank, count, timeout=patience)
    if not distributed.is_nccl_available():
        raise RuntimeError("this build of torch has no NCCL")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = patience
    return distributed.ProcessGroupNCCL(store, rank, count, options)


def pieces(rows: int) -> list[range]:
    """Return the parts of rows that are summed apart, whatever the number of ranks."""
    cuts = [rows * piece // PIECES for piece in range(PIECES + 1)]
    return [range(*ends) for ends in pairwise(cuts) if ends[0] < ends[1]]


@dataclass(frozen=True, slots=True)
class WorkRanks:
    """One of `count` processes that deal out work; without others it has all of it.

    All make the same calls in the same order. What they make does not depend on their number: sums
    over rows are sums of `pieces`, in order.

    words: a group of `torch.distributed` in main memory; group: of the devices, or None: as words;
    device: of this rank.
    """

    rank: int = 0
    count: int = 1
    words: Any = None
    group: Any = None
    device: torch.device = CPU

    @classmethod
    def join(cls, init_method: str, rank: int, count: int, devices: Sequence[str]) -> Self:
        """Meet the others.

        Args:
            init_method: see `torch.distributed`.
            rank: of this process.
            count: of all.
            devices: of each rank.

        Raises:
            BackendUnavailable: they do not meet.
        """
        apart = len({*devices}) == count and "cpu" not in devices  # NCCL wants a GPU for each
        try:
            store, *_ = meet(init_method, rank, count, PATIENCE, is_led=True)
            stores = [PrefixStore(name, store) for name in ("words", "tensors")]
            words = group_of(stores[0], rank, count, PATIENCE, is_nccl=False)
            group = group_of(stores[1], rank, count, PATIENCE, is_nccl=True) if apart else None
        except (RuntimeError, ValueError) as error:
            raise BackendUnavailable(
                f"the processes of {count} GPUs did not meet: {error}; use one, without `--gpus`"
            ) from error
        ranks = cls(rank, count, words, group, torch.device(devices[rank]))
        ranks._connect()
        return ranks

    def _connect(self) -> None:
        """Connect all pairs, while the store in which they met is there."""
        x = torch.zeros(1, device=self.device)
        self._broadcast(x, 0)
        for source in range(self.count):
            for to in range(source + 1, self.count):
                self._pass(x, source, to)
        self.told_by_all(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.group is not None:
            self.group.shutdown()

    def abort(self) -> None:
        """Let what waits for others that are lost end; any thread may call this."""
        if self.group is not None:
            Thread(target=self.group.abort, daemon=True).start()

    @property
    def are_many(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    def own(self, rows: int, rank: int | None = None) -> list[range]:
        """Return the pieces of this rank, or of another, which follow each other."""
        found, mine = pieces(rows), self.rank if rank is None else rank
        ends = (number * len(found) // self.count for number in (mine, mine + 1))
        return found[slice(*ends)]

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Return the rank that does each piece of work: the one with the least before it.

        Args:
            costs: of each piece, in any unit; the most expensive are dealt first.
        """
        loads, dealt = [0.0] * self.count, [0] * len(costs)
        for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
            dealt[place] = rank = loads.index(min(loads))
            loads[rank] += costs[place]
        return dealt

    def total(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int], like: torch.Tensor, to: int = 0
    ) -> torch.Tensor | None:
        """Return at one rank the sum of the parts of all, in the order of ranks and parts.

        Args:
            parts: of this rank, of one shape; the first may be overwritten.
            counts: how many parts each rank has, of which at least one has some.
            like: of their shape, dtype and device.
            to: the rank that receives the sum; others receive None.
        """
        total: torch.Tensor | None = None
        for rank, count in enumerate(counts):
            for place in range(count):
                is_own = rank == self.rank
                if not is_own and to != self.rank:
                    continue
                part = parts[place] if is_own else torch.empty_like(like)
                self._pass(part, rank, to)
                if to == self.rank:
                    total = part if total is None else total.add_(part)
        return total

    def everywhere(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        """Return `total` at all ranks; arguments as there, contiguous."""
        whole = self.total(parts, counts, like)
        x = torch.empty_like(like) if whole is None else whole
        if self.are_many:
            self._broadcast(x, 0)
        return x

    def gather(self, x: torch.Tensor, places: Sequence[int] | None = None) -> torch.Tensor | None:
        """Return at rank 0 the rows of all ranks, in main memory; others receive None.

        Alone, all rows are here, and returned as they are.

        Args:
            x: rows of this rank, (rows, …); their number may differ between ranks.
            places: of this rank's rows among all; None: they are in the order of ranks.
        """
        if not self.are_many:
            return x
        told = self.told_by_all([*places] if places is not None else [None] * len(x))
        order = [(rank, place) for rank, rows in enumerate(told) for place in range(len(rows))]
        if places is not None:  # what several ranks have is that of the first
            order = [*{told[rank][at]: (rank, at) for rank, at in reversed(order)}.values()]
        whole = torch.empty((len(order), *x.shape[1:]), dtype=x.dtype)
        for number, (rank, place) in enumerate(order):  # one at a time: a GPU may be full
            if self.rank not in (0, rank):
                continue
            row = x.new_empty(x.shape[1:], device=self.device)
            if rank == self.rank:  # ranks' own may be in main memory or on their device
                row.copy_(x[place])
            self._pass(row, rank, 0)
            there = told[rank][place]
            if self.rank == 0:
                whole[number if there is None else there].copy_(row)
        return whole if self.rank == 0 else None

    def bring(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        owner: int,
        to: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one rank at all of them, or at one more.

        Args:
            tensors: by name, of the owner; others give None.
            owner: whose they are.
            to: the rank that receives them, others receive none; None: all do.
        """
        if not self.are_many:
            assert tensors is not None
            return dict(tensors)
        own_shapes = {name: (x.shape, x.dtype) for name, x in (tensors or {}).items()}
        shapes = self.told(own_shapes, owner)
        if to is not None and self.rank not in (owner, to):
            return {}
        found = dict[str, torch.Tensor]()
        for name, (shape, dtype) in shapes.items():
            own = None if tensors is None else tensors[name].to(self.device).contiguous()
            x = torch.empty(shape, dtype=dtype, device=self.device) if own is None else own
            self._broadcast(x, owner) if to is None else self._pass(x, owner, to)
            found[name] = x
        return found

    def told(self, words: Any, owner: int = 0) -> Any:
        """Return what one rank says at all of them; what others give is ignored."""
        if not self.are_many:
            return words
        content = pickle.dumps(words) if owner == self.rank else b""
        size = torch.tensor([len(content)])
        self.words.broadcast([size], _root(owner)).wait()
        x = torch.empty(int(size), dtype=torch.uint8)
        if owner == self.rank:
            x = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.words.broadcast([x], _root(owner)).wait()
        return pickle.loads(x.numpy().tobytes())

    def told_by_all(self, words: Any) -> list[Any]:
        """Return what each rank says."""
        return [self.told(words, owner) for owner in range(self.count)]

    def _pass(self, x: torch.Tensor, source: int, to: int) -> None:
        """Send a tensor from one of two ranks to the other, where it is overwritten."""
        if source == to or self.rank not in (source, to) or not x.numel():
            return
        group = self.words if self.group is None or not x.is_cuda else self.group
        own = x if x.is_contiguous() else x.contiguous()
        here = own.cpu() if group is self.words else own
        if self.rank == source:
            group.send([here], to, 0).wait()
            return
        group.recv([here], source, 0).wait()
        if here is not x:
            x.copy_(here)

    def _broadcast(self, x: torch.Tensor, owner: int) -> None:
        """Overwrite a contiguous tensor with that of a rank."""
        flat = x.view(-1).view(torch.uint8)
        if not len(flat):
            return
        if self.group is not None and x.is_cuda:
            self.group.broadcast([flat], _root(owner)).wait()
            return
        here = flat.cpu()
        self.words.broadcast([here], _root(owner)).wait()
        if here is not flat and owner != self.rank:
            flat.copy_(here)


def _root(owner: int) -> Any:
    options = distributed.BroadcastOptions()
    options.rootRank = owner
    return options


ALONE = WorkRanks()
