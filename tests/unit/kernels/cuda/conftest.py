"""Launches on a GPU, recorded instead of made."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from product_walks import H200

from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.plans.product import MOST_ROWS


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Record launches from now on: argument and configuration, or name and what a step is given."""
    found: list[tuple[Any, Any]] = []

    def kept(file: str, name: str, grid: tuple[int, ...], argument: np.void, **how: Any) -> None:
        assert file == ("product.cu" if argument["rows"] <= MOST_ROWS else "batched.cu")
        found.append((argument, how))

    def step(name: str) -> Callable[..., torch.Tensor]:
        def made(x: torch.Tensor, *given: Any) -> torch.Tensor:
            found.append((name, (x, *given)))
            return torch.empty_like(x)

        return made

    monkeypatch.setattr(cuda_products, "launch", kept)
    monkeypatch.setattr(cuda_products, "limits", lambda device: H200)
    for name in ("norm", "activated"):
        monkeypatch.setattr(cuda_products, name, step(name))
    monkeypatch.setattr(cuda_products.cuda_prompts, "add_normed", step("add_normed"))
    return found
