"""Device map: the device of each part of a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The devices of the embedding, of each layer, of the head.

    Each device holds parts that follow each other, so hidden states cross every border once.
    """

    embedding: torch.device
    layers: tuple[torch.device, ...]
    head: torch.device

    @classmethod
    def on(cls, device: torch.device, num_layers: int) -> Self:
        """Return a whole model on one device."""
        return cls(embedding=device, layers=(device,) * num_layers, head=device)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, in the order in which hidden states pass them."""
        return tuple(device for device, _ in groupby((self.embedding, *self.layers, self.head)))

    @property
    def is_split(self) -> bool:
        """Whether there is more than one device."""
        return len(self.devices) > 1

    def spans(self) -> Iterator[tuple[torch.device, range]]:
        """Yield each device and its layers, perhaps none."""
        for device in self.devices:
            mine = [index for index, where in enumerate(self.layers) if where == device]
            yield device, range(mine[0], mine[-1] + 1) if mine else range(0)
