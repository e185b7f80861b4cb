"""Read a model's sublayers one at a time; how many rows pass one together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.config.sublayer_spec import SublayerSpec
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.sublayer import Sublayer
from exl2flow.model.layers.sublayers import Cut, build_sublayer

CALIBRATION_ROWS, CALIBRATION_TENSORS = 4, 24  # see `rows_together`
EXPERT_ROWS = 16  # the same of experts, each of which reads few of their tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSublayers(Sequence[Sublayer]):
    """Sublayers read from disk on each access: memory does not grow with depth."""

    spec: ModelSpec
    tensors: TensorFiles
    dtype: torch.dtype
    device: torch.device
    packed: bool = False

    def __len__(self) -> int:
        return len(self.spec.sublayers)

    def __getitem__(self, index: Any) -> Any:  # an int; nobody takes slices
        return self.read(self.spec.sublayers[index], self.device)

    def read(
        self, sublayer: SublayerSpec, device: torch.device, cut: Cut = lambda _, part: part
    ) -> Sublayer:
        """Return a sublayer, or a part of it, on a device; `cut` as in `build_sublayer`."""
        return build_sublayer(
            self.spec,
            sublayer,
            self.tensors,
            dtype=self.dtype,
            device=device,
            packed=self.packed,
            cut=cut,
        )


def rows_together(
    features: int,
    tokens: int,
    room: int,
    *,
    tensors: int = CALIBRATION_TENSORS,
    most: int = CALIBRATION_ROWS,
) -> int:
    """Return how many rows pass a sublayer together on a GPU; the order of sums depends on it.

    Args:
        features: of the sublayer's widest activation.
        tokens: per row.
        room: bytes of the GPU that may be used.
        tensors: how many fp32 tensors of the widest activation must fit.
        most: rows, whatever the room.
    """
    return max(1, min(most, room // (tensors * tokens * features * torch.float32.itemsize)))
