"""`States`: the states of a generator's slots, of all layers that have one, on their devices.

A text's state cannot be cut like its keys: one place of it is known, and one that it passed at the
last page border. `SavedState` is such a place in host memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from exl2flow.kernels import RING, DeltaSlots
from exl2flow.model import ModelSpec
from exl2flow.model.memory.footprint import delta_slots


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The state of a text, of all layers; `at`: int32 (1,), how many tokens it includes.

    parts: by device, state and inputs of the convolution, (layers, …), there after the events.
    """

    at: torch.Tensor
    parts: list[tuple[torch.Tensor, torch.Tensor]]
    copied: tuple[torch.cuda.Event, ...] = ()

    @property
    def is_there(self) -> bool:
        """Whether the host may read it."""
        return all(event.query() for event in self.copied)  # type: ignore[no-untyped-call]  # torch


class States:
    """States of slots, and of a spare one behind them for texts without a slot.

    nbytes: that they occupy; saved_bytes: of host memory that a `SavedState` takes.
    """

    def __init__(
        self, spec: ModelSpec, slots: int, layers: Sequence[torch.device], page_tokens: int
    ) -> None:
        """Reserve memory on the device of each layer; those with a state are alike."""
        self.spare, self._places = slots, dict[int, tuple[torch.device, int]]()
        delta, counts = spec.deltas[0], Counter[torch.device]()
        for index, (layer, device) in enumerate(zip(spec.attentions, layers, strict=True)):
            if layer == delta:
                self._places[index] = device, counts[device]
                counts[device] += 1
        self._of_device = {
            device: delta_slots(delta, count, slots + 1, device=device, page_tokens=page_tokens)
            for device, count in counts.items()
        }
        self._layers = {
            index: self._of_device[device].layer(place)
            for index, (device, place) in self._places.items()
        }
        self._held: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        parts = [(s.aside[:, 0], s.aside_inputs[:, 0]) for s in self._all]
        sizes = [x.numel() * x.element_size() for part in parts for x in part]
        self._is_pinned = any(device.type == "cuda" for device in counts)
        self.saved_bytes = sum(map(_pinned if self._is_pinned else int, sizes))

    @property
    def _all(self) -> Iterator[DeltaSlots]:
        yield from self._of_device.values()

    @property
    def nbytes(self) -> int:
        """Bytes that they occupy on all devices."""
        held = [x for pair in self._held.values() for x in pair]
        return sum(slots.nbytes for slots in self._all) + sum(x.nbytes for x in held)

    def layer(self, index: int) -> DeltaSlots:
        """Return the states of a layer."""
        return self._layers[index]

    def clear(self, slot: int | slice = slice(None)) -> None:
        """Let the text of a slot, or of all, begin anew."""
        for slots in self._all:
            for x in (slots.state, slots.behind, slots.aside_at):
                x[:, slot].zero_()

    def move(self, source: int, target: int) -> None:
        """Move a slot's text to another slot."""
        for slots in self._all:
            for x in slots.tensors:
                x[:, target] = x[:, source]
        for pair in self._held.values():
            for x in pair:
                x[:, target] = x[:, source]

    def save(self, slot: int) -> SavedState:
        """Copy what a slot has passed at the last page border to the host."""
        pairs = ((s.aside[:, slot], s.aside_inputs[:, slot]) for s in self._all)
        parts = [(self._host(state), self._host(inputs)) for state, inputs in pairs]
        at = self._host(next(self._all).aside_at[0, slot : slot + 1])
        devices = self._of_device if self._is_pinned else ()
        events = (torch.cuda.current_stream(device).record_event() for device in devices)
        return SavedState(at, parts, tuple(events))

    def load(self, slot: int, saved: SavedState, tokens: int) -> None:
        """Let a slot continue behind the first tokens of a text."""
        for slots, (state, inputs) in zip(self._all, saved.parts, strict=True):
            _copy(slots.state[:, slot], state)
            for back in range(inputs.shape[1]):
                place = (tokens - 1 - back) % RING
                slots.inputs[:, slot, place].copy_(inputs[:, -1 - back], non_blocking=True)
        self._stand_at(slot, tokens)

    def hold(self, slot: int) -> None:
        """Copy a slot's state to a second place, from where `go_back` takes it."""
        for device, slots in self._of_device.items():
            if device not in self._held:
                new = torch.zeros_like(slots.state), torch.zeros_like(slots.inputs)
                self._held[device] = new
            state, inputs = self._held[device]
            state[:, slot], inputs[:, slot] = slots.state[:, slot], slots.inputs[:, slot]

    def go_back(self, slot: int, tokens: int) -> None:
        """Restore the state that `hold` copied, of the first `tokens` tokens."""
        for device, slots in self._of_device.items():
            state, inputs = self._held[device]
            slots.state[:, slot], slots.inputs[:, slot] = state[:, slot], inputs[:, slot]
        self._stand_at(slot, tokens)

    def lag(self) -> None:
        """Let the next step apply an accepted token again, to time it."""
        for slots in self._all:
            slots.behind.sub_(1)

    def _stand_at(self, slot: int, tokens: int) -> None:
        for slots in self._all:
            slots.behind[:, slot].fill_(tokens)
            slots.aside_at[:, slot].fill_(0)  # it may include tokens that were taken back

    def _host(self, x: torch.Tensor) -> torch.Tensor:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._is_pinned)
        _copy(host, x)
        return host


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy layer after layer: as a whole, torch would put them side by side on the device first."""
    for x, y in zip(target, source, strict=True):
        x.copy_(y, non_blocking=True)


def _pinned(nbytes: int) -> int:
    """Return the bytes that torch takes of pinned memory: a power of two."""
    return 1 << (nbytes - 1).bit_length()
