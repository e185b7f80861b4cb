"""Small tools: a timer, and a tensor that grows along one dimension."""

import time
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
