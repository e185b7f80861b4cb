"""What a model will take on a GPU: its files less what stays in host memory, and its needs."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from exl2flow.model.config.resolution import resolve
from exl2flow.model.files.canonical import CanonicalTensors
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.mtp import block_in
from exl2flow.model.memory.footprint import Footprint
from exl2flow.model.memory.host_embedding import host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes: weights, of which `host` stay in host memory, and all other needs."""

    weights: int
    host: int
    needs: Footprint

    @property
    def total(self) -> int:
        """The sum on the GPU."""
        return self.weights - self.host + self.needs.total


def plan_of(
    folder: Path, *, embedding: str = "auto", drafts: bool = True, **texts: Any
) -> MemoryPlan:
    """Return the plan for a model folder; headers suffice.

    Args:
        folder: the model.
        embedding: see `load_model`.
        drafts: whether the model's own block drafts tokens, if it has one.
        texts: as `Footprint.of` takes them.

    Raises:
        SourceModelError: the folder is not a model.
        ConfigError: `embedding` contradicts the model.
    """
    spec = resolve(folder)
    tensors = CanonicalTensors(spec)
    return MemoryPlan(
        weights=sum(held_bytes(tensors, name, torch.float16) for name in tensors.names),
        host=host_bytes(spec, tensors.names, wanted=embedding, device=torch.device("cuda")),
        needs=Footprint.of(spec, block=block_in(spec) if drafts else None, **texts),
    )


def held_bytes(tensors: TensorFiles, name: str, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in memory, where floating-point numbers have this dtype."""
    if tensors.dtype(name).is_floating_point and tensors.dtype(name) != dtype:
        return prod(tensors.shape(name)) * dtype.itemsize
    return tensors.nbytes(name)
