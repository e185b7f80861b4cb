"""A model on one device as if there were a border between two devices, where states are rounded."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from exl2flow.model import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Placement):
    """A placement on one device whose layers are run in two spans; `first`: those of the first."""

    first: int

    @property
    def is_split(self) -> bool:
        """Each span has recordings of its own."""
        return True

    def spans(self) -> Iterator[tuple[torch.device, range]]:
        """Yield the device with the layers of each span."""
        yield self.head, range(self.first)
        yield self.head, range(self.first, len(self.layers))


def cut(device: torch.device, layers: int) -> Cut:
    """Return a whole model on a device, cut in the middle."""
    return Cut(embedding=device, layers=(device,) * layers, head=device, first=layers // 2)


def halves(first: torch.device, second: torch.device, layers: int) -> Placement:
    """Return a model on two devices, cut in the middle."""
    some = layers // 2
    of_layer = (first,) * some + (second,) * (layers - some)
    return Placement(embedding=first, layers=of_layer, head=second)
