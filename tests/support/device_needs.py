"""What a split model takes on each device, by the layer split's own sums."""

import torch

from exl2flow.engine.loading.layer_split import Load, Sizes, parts_of
from exl2flow.model import ModelSpec, Placement
from exl2flow.model.memory.footprint import Texts


def needs(
    spec: ModelSpec, sizes: Sizes, placement: Placement, texts: Texts
) -> dict[torch.device, int]:
    """Return an upper bound of the bytes that a model takes on each device."""
    loads = dict[torch.device, Load]()
    devices = (placement.embedding, *placement.layers, placement.head)
    for device, part in zip(devices, parts_of(spec, sizes, texts), strict=True):
        loads[device] = loads.get(device, Load()) + part
    return {device: load.total for device, load in loads.items()}
