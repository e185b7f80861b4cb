"""The launches of products on a GPU, recorded instead of made."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from product_walks import H200, chain, inputs, matrix, names, product, where

from exl2flow.kernels import FEW_ROWS, FusedLinear, NormArgs
from exl2flow.kernels.cuda import compiler
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda.compiler import LaunchRefused
from exl2flow.kernels.cuda.products import multiply
from exl2flow.kernels.plans.product import MOST_ROWS
from exl2flow.kernels.plans.tuning import APART, BATCHED, DECODED, HALVED


@pytest.mark.parametrize("rows", [3, 5])
def test_results_of_a_product_are_where_it_writes(launches: list, rows: int) -> None:
    three = product(matrix(64, 64, (4, 32)), matrix(64, 40, (4, 32)), matrix(64, 32, (6, 64)))
    x = inputs(rows, 64)

    found, last = multiply(x, [three])

    [(argument, how)] = launches
    stage = argument["stages"][0]
    assert [tuple(y.shape) for y in found] == [(rows, 64), (rows, 40), (rows, 32)]
    assert last is found[0]
    assert stage["of"]["y"][:3].tolist() == where(*found)
    assert not stage["of"]["y"][3:].any()
    assert not stage["of"]["residual"].any()
    assert not stage["of"]["copy"].any()
    assert (stage["x"], argument["rows"]) == (x.data_ptr(), rows)
    assert how["together"] == (rows > MOST_ROWS)


def test_a_gated_product_has_one_result(launches: list) -> None:
    gated = product(matrix(64, 96, (4, 32)), matrix(64, 96, (3, 32)), activation="silu")

    [y], _ = multiply(inputs(1, 64), [gated])

    assert launches[0][0]["stages"][0]["of"]["y"].tolist() == [0, *where(y), 0]


@pytest.mark.parametrize("rows", [2, 20])
def test_stages_of_a_chain_read_what_the_ones_before_write(launches: list, rows: int) -> None:
    products, x, hidden = chain(64, 96, 32), inputs(rows, 64), inputs(rows, 64)

    found, last = multiply(x, products, hidden)

    [(argument, how)] = launches
    first, gated, down, outputs, *_ = argument["stages"]
    copies = [first["of"][0]["copy"], gated["of"][1]["copy"], down["of"][0]["copy"]]
    assert [first["x"], gated["x"], down["x"], outputs["x"]] == [x.data_ptr(), *copies]
    between = first["of"][0]["y"]
    assert first["of"][0]["residual"] == hidden.data_ptr()
    assert down["of"][0]["residual"] == between
    assert down["of"][0]["y"] == last.data_ptr()
    assert not gated["of"]["y"].any()
    assert outputs["of"]["y"][:3].tolist() == where(*found)
    written = [*copies, between, last.data_ptr(), *where(*found)]
    assert len({x.data_ptr(), hidden.data_ptr(), *written}) == len(written) + 2
    assert how["together"]


def test_a_chain_without_a_hidden_state_begins_one(launches: list) -> None:
    [_], last = multiply(inputs(1, 64), chain(64, 96, 32)[:3])

    first, _, down, *_ = launches[0][0]["stages"]
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


def test_a_plan_is_made_once_for_so_many_rows(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plan_of = cuda_products.plan_of

    def counted(products: tuple[FusedLinear, ...], rows: int, *given: Any) -> object:
        made.append(rows)
        return plan_of(products, rows, *given)

    monkeypatch.setattr(cuda_products, "plan_of", counted)
    one, other = (product(matrix(64, 32, (4, 32))) for _ in range(2))
    for rows in (1, 2, 1):
        multiply(inputs(rows, 64), [one])
    multiply(inputs(1, 64), [other])

    assert made == [1, 2, 1]
    assert len(launches) == 4


@pytest.mark.parametrize(("limits", "most"), [(H200, 64), ((28, 99 << 10), 16)])
def test_a_launch_has_as_many_rows_as_there_is_memory_for(
    launches: list, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], most: int
) -> None:
    monkeypatch.setattr(cuda_products, "limits", lambda device: limits)
    rows, k = FEW_ROWS - 1, 14336
    x, hidden = inputs(rows, k), inputs(rows, 32)

    [y], last = multiply(x, [product(matrix(k, 32, (4, 32)), adds=True)], hidden)

    firsts, stages = range(0, rows, most), [argument["stages"][0] for argument, _ in launches]
    assert [argument["rows"] for argument, _ in launches] == [
        min(most, rows - first) for first in firsts
    ]
    assert [stage["x"] for stage in stages] == where(*(x[first:] for first in firsts))
    assert [stage["of"][0]["residual"] for stage in stages] == where(
        *(hidden[first:] for first in firsts)
    )
    assert y.shape == last.shape == (rows, 32)


@pytest.mark.parametrize(("rows", "field"), [(1, "place"), (9, "gathers")])
def test_x_is_brought_to_the_order_of_the_rows_unless_it_comes_so(
    launches: list, rows: int, field: str
) -> None:
    products = chain(64, 96, 32)
    ordered = [replace(products[0], is_ordered=True), *products[1:]]
    x = inputs(rows, 64)

    for given in (products, ordered, products):
        multiply(x, given, inputs(rows, 64))

    assert [bool(argument["stages"][0][field]) for argument, _ in launches] == [True, False, True]
    assert [argument["stages"][0]["x"] for argument, _ in launches] == where(x) * 3


def test_only_the_first_of_single_launches_reads_rows_in_order(launches: list) -> None:
    out, gated, down, last = chain(64, 96, 32)
    centered = NormArgs(weight=inputs(1, 64)[0], eps=1e-5, centered=True)
    products = [replace(out, is_ordered=True), replace(gated, norm=centered), down, last]

    multiply(inputs(2, 64), products, inputs(2, 64))

    assert names(launches) == [1, "norm", 3]
    assert [bool(launches[i][0]["stages"][0]["place"]) for i in (0, 2)] == [False, True]


def test_halves_of_the_rows_are_both_in_order(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_products, "limits", lambda device: (28, 99 << 10))
    one = replace(product(matrix(14336, 32, (4, 32))), is_ordered=True)

    multiply(inputs(32, 14336), [one])

    assert [bool(argument["stages"][0]["gathers"]) for argument, _ in launches] == [False, False]


class Refusal:
    """A device that refuses launches; `tried`: rows and products of each."""

    def __init__(self, launch: Callable[..., None], *, together_only: bool) -> None:
        self.tried: list[tuple[int, int]] = []
        self._launch, self._together_only = launch, together_only

    def __call__(self, file: str, name: str, *given: Any, **how: Any) -> None:
        if how["together"] or not self._together_only:
            argument = given[1]
            self.tried.append((int(argument["rows"]), int(argument["count"])))
            raise LaunchRefused(f"{name} of {file}", reason="no room")
        self._launch(file, name, *given, **how)


@pytest.fixture
def refusal(launches: list, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    found = Refusal(cuda_products.launch, together_only=True)
    monkeypatch.setattr(cuda_products, "launch", found)
    compiler.tell_refusal.cache_clear()
    return found


def test_a_refused_chain_runs_product_by_product_from_then_on(
    launches: list, refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    products, hidden = chain(64, 96, 32), inputs(2, 64)

    for _ in range(3):
        launches.clear()
        found, last = multiply(inputs(2, 64), products, hidden)

    first, gated, down, outputs = (argument["stages"][0]["of"] for argument, _ in launches)
    assert refusal.tried == [(2, 4)]
    assert first["residual"].tolist() == [hidden.data_ptr(), 0, 0]
    assert gated["residual"].tolist() == [0, 0, 0]
    assert down["residual"].tolist() == [first["y"][0], 0, 0]
    assert down["y"][0] == last.data_ptr()
    assert outputs["y"].tolist() == where(*found)
    assert caplog.messages == ["launch=product.cu refused=no room instead=its products one by one"]


def test_refused_batched_products_run_with_fewer_rows(
    launches: list, refusal: Refusal, caplog: pytest.LogCaptureFixture
) -> None:
    one, x, hidden = product(matrix(64, 32, (4, 32)), adds=True), inputs(17, 64), inputs(17, 32)

    for _ in range(2):
        launches.clear()
        [y], last = multiply(x, [one], hidden)

    rows = [int(argument["rows"]) for argument, _ in launches]
    firsts = [sum(rows[:index]) for index in range(len(rows))]
    stages = [argument["stages"][0] for argument, _ in launches]
    assert max(rows) <= MOST_ROWS
    assert sum(rows) == 17
    assert refusal.tried == [(17, 1), (12, 1), (8, 1)]  # once for each bucket
    assert [stage["x"] for stage in stages] == where(*(x[first:] for first in firsts))
    assert [stage["of"][0]["residual"] for stage in stages] == where(
        *(hidden[first:] for first in firsts)
    )
    assert y.shape == last.shape == (17, 32)
    assert caplog.messages == ["launch=batched.cu refused=no room instead=half the rows at a time"]


def test_a_product_that_no_launch_fits_is_multiplied_decoded(
    launches: list, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal._together_only = False
    decoded: list[tuple[int, int]] = []

    def kept(x: torch.Tensor, products: list, hidden: torch.Tensor | None) -> Any:
        decoded.append((len(x), len(products)))
        y = x.new_zeros(len(x), products[0].matrices[0].columns)
        return [y], y

    monkeypatch.setattr(cuda_products.cuda_prompts, "multiply", kept)

    for _ in range(2):
        [y], _ = multiply(inputs(3, 64), [product(matrix(64, 32, (4, 32)))])

    assert decoded == [(3, 1)] * 2
    assert y.shape == (3, 32)
    assert launches == []


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chains run so, and products as by default."""
    monkeypatch.setattr(
        cuda_products, "_choice", lambda products, rows: way if len(products) > 1 else None
    )


def test_a_chain_runs_apart_where_that_is_faster(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(APART, monkeypatch)
    products = chain(64, 96, 32)

    multiply(inputs(1, 64), products, inputs(1, 64))

    assert [argument["count"] for argument, _ in launches] == [1] * len(products)
    assert [facts.kernel for facts in cuda_products.launches(products, 1)] == [
        "product<1, false>"
    ] * len(products)


def test_few_rows_are_batched_where_that_is_faster(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(BATCHED, monkeypatch)
    names: list[str] = []
    monkeypatch.setattr(
        cuda_products, "launch", lambda file, name, *rest, **how: names.append(name)
    )

    multiply(inputs(3, 64), chain(64, 96, 32), inputs(3, 64))

    assert names == ["batched<8, false>"]


def test_many_rows_are_decoded_where_that_is_faster(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(DECODED, monkeypatch)
    taken: list[int] = []
    expected = [inputs(20, 32)], inputs(20, 64)

    def decoded(x: torch.Tensor, *given: object) -> tuple[list[torch.Tensor], torch.Tensor]:
        taken.append(len(x))
        return expected

    monkeypatch.setattr(cuda_products.cuda_prompts, "multiply", decoded)
    products = chain(64, 96, 32)

    assert multiply(inputs(20, 64), products, inputs(20, 64)) is expected
    assert taken == [20]
    assert launches == []
    assert cuda_products.launches(products, 20) == []


def test_four_rows_without_room_for_a_chain_are_batched(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        cuda_products, "launch", lambda file, name, *rest, **how: names.append(name)
    )
    monkeypatch.setattr(cuda_products, "plan_of", lambda *given: None)

    multiply(inputs(4, 64), chain(64, 96, 32), inputs(4, 64))

    assert names == ["batched<8, false>"]


def test_ways_that_are_measured_begin_with_the_default(launches: list) -> None:
    products = chain(64, 96, 32)

    def ways(rows: int, count: int = 4) -> list[object]:
        return [*cuda_products._ways(inputs(rows, 64), products[:count], inputs(rows, 64))]

    assert ways(1)[0] == (1, 1, 1, 1)
    assert ways(1)[-1] == APART
    assert ways(4)[0] == (1, 1, 1, 1)
    assert ways(4)[-2:] == [BATCHED, APART]
    assert ways(1, 1) == ways(4, 1) == [(1,), (2,)]
    assert ways(32) == [BATCHED, DECODED]
    assert ways(33) == ways(33, 1) == [BATCHED, HALVED, DECODED]
