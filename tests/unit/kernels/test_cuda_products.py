"""The launches of products on a GPU, recorded instead of made."""

from typing import Any

import numpy as np
import pytest
import torch
from product_walks import H200, chain, matrix, product

from exl2flow.kernels import FEW_ROWS, Product, cuda_products, packed
from exl2flow.kernels.cuda_products import decode_packed, multiply
from exl2flow.kernels.torch_ops import TORCH_OPS


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.void, dict[str, Any]]]:
    """Record launches from now on: their argument and configuration."""
    found: list[tuple[np.void, dict[str, Any]]] = []

    def kept(file: str, name: str, grid: tuple[int, ...], argument: np.void, **how: Any) -> None:
        assert file == "product.cu"
        found.append((argument, how))

    def same(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        assert order.shape == x.shape[1:]
        return x

    monkeypatch.setattr(cuda_products, "launch", kept)
    monkeypatch.setattr(cuda_products, "limits", lambda device: H200)
    monkeypatch.setattr(cuda_products, "reordered", same)
    return found


def inputs(rows: int, k: int) -> torch.Tensor:
    return torch.zeros(rows, k, dtype=torch.float16)


def where(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_results_of_a_product_are_where_it_writes(launches: list) -> None:
    three = product(matrix(64, 64, (4, 32)), matrix(64, 40, (4, 32)), matrix(64, 32, (6, 64)))
    x = inputs(5, 64)

    found, last = multiply(x, [three])

    [(argument, how)] = launches
    stage = argument["stages"][0]
    assert [tuple(y.shape) for y in found] == [(5, 64), (5, 40), (5, 32)]
    assert last is found[0]
    assert stage["of"]["y"].tolist() == where(*found)
    assert not stage["of"]["residual"].any()
    assert not stage["of"]["copy"].any()
    assert (stage["x"], argument["rows"]) == (x.data_ptr(), 5)
    assert not how["together"]


def test_a_gated_product_has_one_result(launches: list) -> None:
    gated = product(matrix(64, 96, (4, 32)), matrix(64, 96, (3, 32)), activation="silu")

    [y], _ = multiply(inputs(1, 64), [gated])

    assert launches[0][0]["stages"][0]["of"]["y"].tolist() == [0, *where(y), 0]


def test_stages_of_a_chain_read_what_the_ones_before_write(launches: list) -> None:
    products, x, hidden = chain(64, 96, 32), inputs(2, 64), inputs(2, 64)

    found, last = multiply(x, products, hidden)

    [(argument, how)] = launches
    first, gated, down, outputs = argument["stages"]
    copies = [first["of"][0]["copy"], gated["of"][1]["copy"], down["of"][0]["copy"]]
    assert [first["x"], gated["x"], down["x"], outputs["x"]] == [x.data_ptr(), *copies]
    between = first["of"][0]["y"]
    assert first["of"][0]["residual"] == hidden.data_ptr()
    assert down["of"][0]["residual"] == between
    assert down["of"][0]["y"] == last.data_ptr()
    assert not gated["of"]["y"].any()
    assert outputs["of"]["y"].tolist() == where(*found)
    written = [*copies, between, last.data_ptr(), *where(*found)]
    assert len({x.data_ptr(), hidden.data_ptr(), *written}) == len(written) + 2
    assert how["together"]


def test_a_chain_without_a_hidden_state_begins_one(launches: list) -> None:
    [_], last = multiply(inputs(1, 64), chain(64, 96, 32)[:3])

    first, _, down, _ = launches[0][0]["stages"]
    assert first["of"][0]["residual"] == 0
    assert down["of"][0]["residual"] == first["of"][0]["y"] != 0
    assert down["of"][0]["y"] == last.data_ptr()


def test_products_without_room_for_all_are_launched_one_by_one(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_products, "limits", lambda device: (1, H200[1]))
    products, hidden = chain(64, 96, 32), inputs(2, 64)

    found, last = multiply(inputs(2, 64), products, hidden)

    first, gated, down, outputs = (argument["stages"][0]["of"] for argument, _ in launches)
    assert not any(how["together"] for _, how in launches)
    assert first["residual"].tolist() == [hidden.data_ptr(), 0, 0]
    assert gated["residual"].tolist() == [0, 0, 0]
    assert down["residual"].tolist() == [first["y"][0], 0, 0]
    assert down["y"][0] == last.data_ptr()
    assert outputs["y"].tolist() == where(*found)


@pytest.mark.parametrize("zeros", [False, True])
def test_a_decoded_matrix_has_room_for_whole_tiles(
    monkeypatch: pytest.MonkeyPatch, zeros: bool
) -> None:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_products, "launch", lambda *given, **how: found.append((*given, how)))
    one = matrix(96, 300, (4, 32), zeros=zeros)

    decoded = decode_packed(one)

    [(_, name, grid, codes, scales, table, order, room, *numbers, how)] = found
    assert name == ("decode_gptq" if zeros else "decode_exl2")
    assert decoded.shape == (96, 300)
    assert decoded.data_ptr() == room.data_ptr()
    assert room.shape == (96, 320)
    assert (codes is one.codes, scales is one.scales, order is one.order) == (True, True, True)
    assert table.tolist() == [[4, 0, 0], [4, 4, 1], [4, 8, 2]]
    assert numbers == [3, 10, 4 * 96 * 4, 3]
    assert (grid, how) == ((2, 3), {"threads": 256})


def test_many_rows_meet_decoded_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    products = chain(64, 96, 32)
    for module in (packed, cuda_products):
        monkeypatch.setattr(
            module, "decode_packed", lambda m: torch.ones(*m.shape, dtype=torch.float16) / 64
        )
    monkeypatch.setattr(cuda_products, "gated", TORCH_OPS.gated)
    x, hidden = (torch.randn(FEW_ROWS + 1, 64).half() for _ in range(2))

    found, last = multiply(x, products, hidden)

    expected, grown = TORCH_OPS.multiply(x, products, hidden)
    for y, z in zip([*found, last], [*expected, grown], strict=True):
        torch.testing.assert_close(y, z, rtol=4e-3, atol=4e-3)


def test_a_plan_is_made_once_for_so_many_rows(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plan_of = cuda_products.plan_of

    def counted(products: tuple[Product, ...], rows: int, **limits: int) -> object:
        made.append(rows)
        return plan_of(products, rows, **limits)

    monkeypatch.setattr(cuda_products, "plan_of", counted)
    one, other = (product(matrix(64, 32, (4, 32))) for _ in range(2))
    for rows in (1, 2, 1):
        multiply(inputs(rows, 64), [one])
    multiply(inputs(1, 64), [other])

    assert made == [1, 2, 1]
    assert len(launches) == 4


@pytest.mark.parametrize(("limits", "most"), [(H200, 16), ((128, 99 << 10), 8)])
def test_a_launch_has_as_many_rows_as_there_is_memory_for(
    launches: list, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], most: int
) -> None:
    monkeypatch.setattr(cuda_products, "limits", lambda device: limits)
    x, hidden = inputs(FEW_ROWS - 1, 64), inputs(FEW_ROWS - 1, 32)

    [y], last = multiply(x, [product(matrix(64, 32, (4, 32)), adds=True)], hidden)

    firsts, stages = range(0, len(x), most), [argument["stages"][0] for argument, _ in launches]
    assert [argument["rows"] for argument, _ in launches] == [
        min(most, len(x) - first) for first in firsts
    ]
    assert [stage["x"] for stage in stages] == where(*(x[first:] for first in firsts))
    assert [stage["of"][0]["residual"] for stage in stages] == where(
        *(hidden[first:] for first in firsts)
    )
    assert y.shape == last.shape == (FEW_ROWS - 1, 32)
