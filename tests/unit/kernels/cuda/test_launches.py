"""Launches that are told are those that `multiply` makes, here recorded."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from product_walks import RTX_4090, chain, matrix, parallel, product

from exl2flow.kernels import FEW_ROWS, FusedLinear, NormArgs
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.plans.product import LaunchPlan
from exl2flow.kernels.plans.tuning import HALVED

LAYERNORM = NormArgs(weight=torch.rand(64).half(), eps=1e-5, bias=torch.zeros(64).half())
CALLS = {
    "chain": lambda: chain(64, 96, 32),
    "large": lambda: chain(4096, 14336, 1024),
    "parallel": lambda: parallel(64, 96, 32),
    "two forms": lambda: [
        product(matrix(64, 64, (4, 32))),
        product(matrix(64, 64, (4, 32), zeros=True)),
    ],
    "norm apart": lambda: [
        product(matrix(64, 64, (4, 32)), adds=True),
        replace(product(matrix(64, 96, (4, 32))), norm=LAYERNORM),
    ],
    "activation apart": lambda: [
        product(matrix(64, 96, (4, 32)), activation="relu2"),
        product(matrix(96, 64, (4, 32)), adds=True),
    ],
}
Made = list[tuple[str, int, int]]  # kernel, slots, bytes of shared memory


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return the launches made from now on; products and what is between them have no results."""
    found: Made = []

    def kept(file: str, name: str, grid: tuple[int, ...], argument: np.void, **how: Any) -> None:
        found.append((name, int(argument["slots"]), how["shared"]))

    monkeypatch.setattr(cuda_products, "launch", kept)
    monkeypatch.setattr(cuda_products, "limits", lambda device: RTX_4090)
    for name in ("norm", "activated"):
        monkeypatch.setattr(cuda_products, name, lambda x, *rest: torch.empty_like(x))
    prompts = cuda_products.cuda_prompts
    monkeypatch.setattr(prompts, "multiply", lambda x, *rest: ([x], x))
    monkeypatch.setattr(prompts, "finished", lambda product, results, *rest: results)
    return found


@pytest.mark.parametrize("rows", [1, 3, 7, 20, 32, 33, 64])
@pytest.mark.parametrize("name", CALLS)
def test_launches_that_are_told_are_those_made(made: Made, name: str, rows: int) -> None:
    products = CALLS[name]()
    x = torch.zeros(rows, len(products[0].order), dtype=torch.float16)

    cuda_products.multiply(x, products)

    told = cuda_products.launches(products, rows)
    assert [(facts.kernel, facts.slots, facts.shared) for facts in told] == made
    assert (not told) == (name == "two forms")


def test_a_chain_is_one_launch_of_all_its_products(made: Made) -> None:
    [facts] = cuda_products.launches(chain(64, 96, 32), 1)

    assert facts.products == 4
    assert 0 < facts.fill < 1


def test_more_rows_than_kernels_have_are_no_launches() -> None:
    assert cuda_products.launches(chain(64, 96, 32), FEW_ROWS + 1) == []


@pytest.mark.parametrize("is_chosen", [False, True])
def test_more_rows_of_a_chain_without_a_launch_are_halved(
    made: Made, monkeypatch: pytest.MonkeyPatch, is_chosen: bool
) -> None:
    plan_of = cuda_products.batched.plan_of

    def few(products: list[FusedLinear], rows: int, limits: tuple[int, int]) -> LaunchPlan | None:
        return plan_of(products, rows, limits) if rows <= 32 else None

    def choice(products: list[FusedLinear], rows: int) -> str | None:
        return HALVED if rows > 32 else None

    if is_chosen:
        monkeypatch.setattr(cuda_products, "_choice", choice)
    else:
        monkeypatch.setattr(cuda_products.batched, "plan_of", few)
    products, x = chain(64, 96, 32), torch.randn(41, 64).half()

    found, last = cuda_products.multiply(x, products, x)

    assert [name for name, *_ in made] == 2 * ["batched<32, false>"]
    assert [facts.products for facts in cuda_products.launches(products, 41)] == [4, 4]
    assert len(last) == len(found[0]) == 41
