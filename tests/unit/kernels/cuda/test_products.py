"""The launches of products on a GPU, recorded instead of made."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from product_walks import H200, chain, matrix, product

from exl2flow.kernels import FEW_ROWS, FusedLinear, NormArgs
from exl2flow.kernels.cuda import compiler
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda.compiler import LaunchRefused
from exl2flow.kernels.cuda.products import multiply
from exl2flow.kernels.plans.product import MOST_ROWS
from exl2flow.kernels.plans.tuning import APART, BATCHED, DECODED, HALVED


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


def inputs(rows: int, k: int) -> torch.Tensor:
    return torch.zeros(rows, k, dtype=torch.float16)


def where(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


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
    products = [replace(out, is_ordered=True), replace(gated, norm=CENTERED), down, last]

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


RMS = NormArgs(weight=inputs(1, 64)[0], eps=1e-5)
CENTERED = replace(RMS, centered=True)


def names(launches: list) -> list[str | int]:
    """Return the steps by name, and the products by their number in a launch."""
    return [a if isinstance(a, str) else int(a["count"]) for a, _ in launches]


def test_a_multiplier_is_the_kernel_s_work(launches: list) -> None:
    one = replace(product(matrix(64, 64, (4, 32)), adds=True), multiplier=0.22)

    multiply(inputs(2, 64), [one, product(matrix(64, 32, (4, 32)))], inputs(2, 64))

    [(argument, _)] = launches
    assert argument["stages"]["multiplier"][:2].tolist() == [np.float32(0.22), 1.0]


def test_norms_of_results_are_added_by_what_reads_them(launches: list) -> None:
    out, gated, down, last = chain(64, 96, 32)
    products = [
        replace(out, after=RMS, multiplier=0.5),
        replace(gated, norm=RMS),
        replace(down, after=RMS),
        replace(last, norm=RMS),
    ]
    hidden = inputs(1, 64)

    found, states = multiply(inputs(1, 64), products, hidden)

    [(argument, _)] = launches
    of_out, of_gated, of_down, of_last, *_ = argument["stages"]
    assert not of_out["after"]
    assert not of_down["after"]
    assert of_gated["after"] != of_last["after"]
    assert [stage["x"] for stage in (of_gated, of_last)] == [
        stage["of"][0]["copy"] for stage in (of_out, of_down)
    ]
    assert of_gated["hidden"] == hidden.data_ptr()
    assert of_last["hidden"] == of_gated["sum"]
    assert of_last["sum"] == states.data_ptr()
    assert [stage["multiplier"] for stage in argument["stages"]] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert (of_gated["after_multiplier"], of_last["after_multiplier"]) == (0.5, 1)
    assert of_gated["after_eps"] == np.float32(RMS.eps)
    assert not argument["stages"]["of"]["residual"].any()
    assert not argument["stages"]["of"]["y"][:3].any()
    assert of_last["of"]["y"].tolist() == where(*found)


def test_norms_of_results_of_a_few_rows_are_added_by_themselves(launches: list) -> None:
    out, gated, *_ = chain(64, 96, 32)
    products = [replace(out, after=RMS), replace(gated, norm=RMS)]

    multiply(inputs(4, 64), products, inputs(4, 64))

    assert names(launches) == [1, "add_normed", 1]


def test_norms_of_batched_results_are_added_in_the_launch(launches: list) -> None:
    out, gated, down, last = chain(64, 96, 32)
    products = [
        replace(out, after=RMS, multiplier=0.5),
        replace(gated, norm=RMS),
        replace(down, after=RMS),
        replace(last, norm=RMS),
    ]
    x, hidden = inputs(9, 64), inputs(9, 64)

    found, states = multiply(x, products, hidden)

    [(argument, _)] = launches
    of_out, of_gated, of_down, of_last, *_ = argument["stages"]
    assert of_out["after"] == of_down["after"] == RMS.weight.data_ptr()
    assert of_out["hidden"] == hidden.data_ptr()
    assert of_down["hidden"] == of_out["sum"]
    assert of_down["sum"] == states.data_ptr()
    assert [of_gated["x"], of_last["x"]] == [of_out["next"], of_down["next"]]
    assert of_out["summed"] == of_gated["squares"] != of_out["squared"]
    assert of_down["summed"] == of_last["squares"] != of_down["squared"]
    assert (of_out["after_multiplier"], of_down["after_multiplier"]) == (0.5, 1)
    assert [stage["multiplier"] for stage in argument["stages"]] == [1] * 4
    assert not argument["stages"]["of"]["residual"].any()
    assert not argument["stages"]["of"][[0, 2]]["copy"].any()
    assert of_last["of"]["y"][:3].tolist() == where(*found)


def test_the_first_norm_of_batched_products_comes_before_the_launch(launches: list) -> None:
    normed = replace(product(matrix(64, 32, (4, 32))), norm=RMS)

    multiply(inputs(9, 64), [normed])
    multiply(inputs(2, 64), [normed])

    assert names(launches) == ["norm", 1, 1]


def test_other_norms_of_results_are_added_by_themselves(launches: list) -> None:
    out, gated, down, last = chain(64, 96, 32)
    products = [
        replace(out, after=RMS),
        replace(gated, norm=CENTERED),
        replace(down, after=CENTERED, multiplier=0.5),
        replace(last, norm=RMS),
    ]
    hidden = inputs(2, 64)

    found, states = multiply(inputs(2, 64), products, hidden)

    assert names(launches) == [1, "add_normed", "norm", 2, "add_normed", 1]
    (first, _), (_, added), _, (between, _), (_, grown), (outputs, _) = launches
    [of_out], [_, of_down] = first["stages"][:1], between["stages"][:2]
    assert where(added[0]) == [of_out["of"][0]["y"]]
    assert added[1] is RMS
    assert added[2] is hidden
    assert where(grown[0]) == [of_down["of"][0]["y"]]
    assert grown[1] is CENTERED
    assert grown[3] == 0.5
    assert outputs["stages"][0]["x"] == states.data_ptr()
    assert outputs["stages"][0]["of"]["y"].tolist() == where(*found)


def test_norms_that_the_kernel_does_not_know_come_before_a_launch(launches: list) -> None:
    out, gated, down, last = chain(64, 96, 32)
    hidden = inputs(2, 64)
    products = [out, replace(gated, norm=CENTERED), down, replace(last, norm=CENTERED)]

    _, states = multiply(inputs(2, 64), products, hidden)

    assert names(launches) == [1, "norm", 2, "norm", 1]
    grown, down_entry = launches[1][1][0], launches[2][0]["stages"][1]["of"][0]
    assert launches[0][0]["stages"][0]["of"][0]["residual"] == hidden.data_ptr()
    assert down_entry["residual"] == grown.data_ptr()
    assert down_entry["y"] == launches[3][1][0].data_ptr() == states.data_ptr()
    assert not launches[2][0]["stages"][0]["norm"]


def test_means_are_subtracted_within_a_batched_launch(launches: list) -> None:
    out, gated, down, last = chain(64, 96, 32)
    products = [out, replace(gated, norm=CENTERED), down, replace(last, norm=RMS)]

    multiply(inputs(9, 64), products, inputs(9, 64))

    [(argument, _)] = launches
    assert argument["stages"]["centered"].tolist() == [0, 1, 0, 0]
    assert argument["stages"]["totals"].tolist() == [1, 0, 0, 0]
    assert argument["stages"]["squares"][1] == argument["stages"]["squared"][0] != 0


def test_norms_with_biases_come_before_a_batched_launch(launches: list) -> None:
    out, gated, *_ = chain(64, 96, 32)
    biased = replace(CENTERED, bias=torch.zeros(64).half())

    multiply(inputs(9, 64), [out, replace(gated, norm=biased)], inputs(9, 64))

    assert names(launches) == [1, "norm", 1]


def with_beside() -> list[FusedLinear]:
    out, gated, down, inputs = chain(64, 96, 32)
    beside = [replace(matrix, order=gated.order) for matrix in inputs.matrices]
    return [out, replace(gated, matrices=(*gated.matrices, *beside), norm=CENTERED), down]


def test_matrices_beside_a_gate_write_their_results_in_its_stage(launches: list) -> None:
    hidden = inputs(9, 64)

    [last, *beside], states = multiply(inputs(9, 64), with_beside(), hidden)

    [(argument, _)] = launches
    _, of_gated, of_down, _ = argument["stages"]
    assert last is states
    assert of_gated["of"]["y"].tolist() == [0, 0, *where(*beside)]
    assert of_down["x"] == of_gated["of"][1]["copy"] != 0
    assert not of_gated["of"]["copy"][2:].any()


def test_matrices_beside_a_gate_of_few_rows_have_a_launch(launches: list) -> None:
    [last, *beside], states = multiply(inputs(2, 64), with_beside(), inputs(2, 64))

    assert names(launches) == [1, "norm", 1, 2]
    first, _, (of_beside, _), (of_mlp, _) = launches
    assert last is states
    assert first[0]["stages"][0]["of"][0]["y"] == launches[1][1][0].data_ptr()
    assert of_beside["stages"][0]["of"]["y"].tolist() == where(*beside)
    assert of_mlp["stages"][1]["of"][0]["y"] == states.data_ptr()


def test_launches_of_matrices_beside_a_gate_are_told(launches: list) -> None:
    products = with_beside()

    counts = [[facts.products for facts in cuda_products.launches(products, r)] for r in (2, 9)]

    assert counts == [[1, 1, 2], [3]]


def test_one_matrix_is_activated_between_launches(launches: list) -> None:
    up = product(matrix(64, 96, (4, 32)), activation="relu2")
    down = product(matrix(96, 64, (4, 32)), adds=True)
    hidden = inputs(2, 64)

    [y], states = multiply(inputs(2, 64), [up, down], hidden)

    assert names(launches) == [1, "activated", 1]
    assert launches[0][0]["stages"][0]["activation"] == 0
    assert launches[1][1][1] == "relu2"
    assert launches[2][0]["stages"][0]["of"][0]["residual"] == hidden.data_ptr()
    assert states is y


def test_a_plan_without_the_rest_of_a_product_is_made_once(
    launches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    plan_of = cuda_products.plan_of
    monkeypatch.setattr(
        cuda_products, "plan_of", lambda *given, **how: made.append(1) or plan_of(*given, **how)
    )
    one = replace(product(matrix(64, 64, (4, 32)), adds=True), after=RMS)

    for _ in range(3):
        multiply(inputs(1, 64), [one])

    assert made == [1]
    before = len(cuda_products._PARTS)
    del one
    launches.clear()
    gc.collect()
    assert len(cuda_products._PARTS) == before - 1


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
