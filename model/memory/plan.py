"""What a model will take on a GPU: its files less what stays in host memory, and its needs."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from exl2flow.model.config.mtp import mtp_of
from exl2flow.model.config.resolution import resolve
from exl2flow.model.files.canonical import CanonicalTensors
from exl2flow.model.layers.mtp import is_complete
from exl2flow.model.memory.footprint import HALF, Footprint
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
    tensors, block = CanonicalTensors(spec), mtp_of(spec)
    is_drafting = drafts and block is not None and is_complete(block)
    return MemoryPlan(
        weights=sum(_held(tensors, name) for name in tensors.names),
        host=host_bytes(spec, tensors.names, wanted=embedding, device=torch.device("cuda")),
        needs=Footprint.of(spec, block=block if is_drafting else None, **texts),
    )


def _held(tensors: CanonicalTensors, name: str) -> int:
    """Return the bytes of a tensor on a GPU, where floating-point numbers are fp16."""
    is_float = tensors.dtype(name).is_floating_point
    return HALF * prod(tensors.shape(name)) if is_float else tensors.nbytes(name)
