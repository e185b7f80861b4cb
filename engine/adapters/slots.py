"""`AdapterSlots`: the adapters of each slot, and their matrices beside the weights of a decoder.

Each activation is multiplied by all adapters at once; what its text does not use is set to zero.
So a text may use several, and recorded steps read a mask at a fixed address.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch

from exl2flow.engine.adapters.adapter import Adapter
from exl2flow.kernels import on_device
from exl2flow.model import Decoder
from exl2flow.model.layers.low_rank import LowRank, with_low_rank

Used = tuple[Adapter, ...]
ALIGNED = 8  # ranks, so that rows of fp16 begin at multiples of 16 bytes


class AdapterSlots:
    """The adapters of a generator's slots; they take no memory before one is used.

    Tensors stay where they are until no room is left for what the slots use.
    """

    def __init__(self, decoder: Decoder, slots: int, moved: Callable[[str], None]) -> None:
        """Take a decoder, which is not changed; `moved` is called with a `mark` if tensors move."""
        self._plain = self._decoder = decoder
        self._parts, self._moved = list[LowRank](), [moved]
        self._used = dict[int, Used]()  # by slot
        self._stored, self._width = list[Adapter | None](), 0  # each has room for `width` ranks
        self._keys = set[str]()  # of the projections that adapters may change
        self._slots, self._unused = slots, dict[torch.device, torch.Tensor]()  # of `LowRank`

    def on_move(self, moved: Callable[[str], None]) -> None:
        """Add a function to call with a `mark` if tensors move."""
        self._moved.append(moved)

    @property
    def mark(self) -> str:
        """Part of the key of a step's graph: with adapters, or without."""
        return "adapted" if self._used else "plain"

    def enter(self, slot: int, adapters: Used = ()) -> None:
        """Let a slot use adapters, or none."""
        self._used.pop(slot, None)
        self._used |= {slot: adapters} if adapters else {}
        if adapters or self._stored:
            self._hold(())

    def move(self, source: int, target: int) -> None:
        """Move the adapters of a slot to another one."""
        self.enter(target, self._used.pop(source, ()))

    def for_slots(self, slots: int) -> Decoder:
        """Return the decoder for a step of the first slots, (slots, t) tokens."""
        if not self._used:
            return self._plain
        return self._with({device: x[:slots] for device, x in self._unused.items()})

    def for_texts(self, texts: Sequence[Used], counts: Sequence[int]) -> Decoder:
        """Return the decoder for a pass (1, t) over texts: adapters and token counts of each."""
        if not any(texts):
            return self._plain
        self._hold(chain(*texts))
        mask = self._rank_mask(texts).repeat_interleave(torch.tensor(counts), dim=0).transpose(0, 1)
        return self._with({device: on_device(mask, device) for device in self._unused})

    def _with(self, unused: Mapping[torch.device, torch.Tensor]) -> Decoder:
        for part in self._parts:
            part.unused = unused[part.device]
        return self._decoder

    def _rank_mask(self, texts: Iterable[Used]) -> torch.Tensor:
        """Return the mask of the ranks that each text does not use, bool (texts, 1, 1, ranks)."""
        unused = [[adapter not in used for adapter in self._stored] for used in texts]
        return torch.tensor(unused).repeat_interleave(self._width, dim=1)[:, None, None]

    def _hold(self, adapters: Iterable[Adapter]) -> None:
        """Store adapters beside those of the slots, instead of unused ones if need be."""
        needed = [*dict.fromkeys(chain(adapters, *self._used.values()))]
        new = [adapter for adapter in needed if adapter not in self._stored]
        free = [i for i, adapter in enumerate(self._stored) if adapter not in needed]
        fits = all(a.rank <= self._width and a.matrices.keys() <= self._keys for a in new)
        if len(new) > len(free) or not fits:
            self._grow(needed)
            new, free = needed, [*range(len(self._stored))]
        free.sort(key=lambda i: self._stored[i] is not None)  # idle adapters stay if they can
        for i, adapter in zip(free, new, strict=False):
            self._stored[i] = None  # until all of it is there: memory may run out
            for part in self._parts:
                part.put(adapter.matrices, i * self._width, self._width)
            self._stored[i] = adapter
        mask = self._rank_mask(self._used.get(slot, ()) for slot in range(self._slots))
        for unused in self._unused.values():
            unused.copy_(mask, non_blocking=True)

    def _grow(self, needed: Sequence[Adapter]) -> None:
        """Make room for the needed adapters in new tensors, which are empty."""
        if not self._parts:
            self._decoder, self._parts = with_low_rank(self._plain)
        dtype = self._plain.embedding.weight.dtype
        keys = self._keys.union(*(adapter.matrices for adapter in needed))
        width = max(self._width, *(-(-adapter.rank // ALIGNED) * ALIGNED for adapter in needed))
        count = max(len(self._stored), 1 << (len(needed) - 1).bit_length())
        changed = [part for part in self._parts if part.keys & keys]
        shape = (self._slots, 1, 1, count * width)
        devices = dict.fromkeys(self._plain.placement.layers)
        # Memory may run out, so nothing changes before all of it is there
        unused = {x: torch.ones(shape, dtype=torch.bool, device=x) for x in devices}
        rooms = [part.room(count * width, dtype) for part in changed]
        for part, (down, ups) in zip(changed, rooms, strict=True):
            part.down, part.ups = down, ups
        self._unused = unused
        self._stored, self._width, self._keys = [None] * count, width, keys
        for moved in self._moved:
            moved("adapted")
