"""Small tools: a timer, a tensor that grows along one dimension, padded rows, comparison."""

import time
from collections.abc import Sequence
from typing import Any, Self

import torch


class Timer:
    """`with Timer() as t: …` leaves the seconds in `t.interval`."""

    def __enter__(self) -> Self:
        self.start = time.time()
        return self

    def __exit__(self, *error: object) -> None:
        self.interval = time.time() - self.start


class SeqTensor:
    def __init__(self, shape: Any, dtype: torch.dtype, seq_dim: int, init_cap: int = -1) -> None:
        self.tensor, self.seq_dim = torch.empty(shape, dtype=dtype), seq_dim

    def __len__(self) -> int:
        return self.tensor.shape[self.seq_dim]

    def append(self, new_data: torch.Tensor) -> None:
        self.tensor = torch.cat([self.tensor, new_data], self.seq_dim)

    def torch(self) -> torch.Tensor:
        return self.tensor


def unpadded(
    rows: Sequence[list[int]], mask: torch.Tensor | None, offsets: torch.Tensor | None
) -> list[list[int]]:
    """Return rows without their padding, by offsets (b, 1), each minus the padding, or a mask."""
    pads = [0] * len(rows) if mask is None else (mask < 0).sum(-1).tolist()
    if offsets is not None:
        pads = [-int(offset) for offset in offsets.flatten()]
    return [row[pad:] for row, pad in zip(rows, pads, strict=True)]


def are_same(first: Any, second: Any) -> bool:
    """Return whether two values are equal, which may be tensors."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and first == second
