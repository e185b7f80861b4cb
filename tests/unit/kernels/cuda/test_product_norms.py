"""What products do before and after their matrices: in their launches, or in others."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from product_walks import chain, inputs, matrix, names, parallel, product, where

from exl2flow.kernels import FusedLinear, NormArgs
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda.products import multiply

RMS = NormArgs(weight=inputs(1, 64)[0], eps=1e-5)
CENTERED = replace(RMS, centered=True)


def normed() -> list[FusedLinear]:
    """Return a chain that normalizes hidden states, and what is added to them."""
    out, gated, down, last = chain(64, 96, 32)
    return [
        replace(out, after=RMS, multiplier=0.5),
        replace(gated, norm=RMS),
        replace(down, after=RMS),
        replace(last, norm=RMS),
    ]


def test_a_multiplier_is_the_kernel_s_work(launches: list) -> None:
    one = replace(product(matrix(64, 64, (4, 32)), adds=True), multiplier=0.22)

    multiply(inputs(2, 64), [one, product(matrix(64, 32, (4, 32)))], inputs(2, 64))

    [(argument, _)] = launches
    assert argument["stages"]["multiplier"][:2].tolist() == [np.float32(0.22), 1.0]


def test_norms_of_results_are_added_by_what_reads_them(launches: list) -> None:
    products = normed()
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
    products = normed()
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


def test_matrices_beside_a_gate_write_their_results_in_its_stage(launches: list) -> None:
    hidden = inputs(9, 64)

    [last, *beside], states = multiply(inputs(9, 64), parallel(64, 96, 32), hidden)

    [(argument, _)] = launches
    _, of_gated, of_down, _ = argument["stages"]
    assert last is states
    assert of_gated["of"]["y"].tolist() == [0, 0, *where(*beside)]
    assert of_down["x"] == of_gated["of"][1]["copy"] != 0
    assert not of_gated["of"]["copy"][2:].any()


def test_matrices_beside_a_gate_of_few_rows_have_a_launch(launches: list) -> None:
    [last, *beside], states = multiply(inputs(2, 64), parallel(64, 96, 32), inputs(2, 64))

    assert names(launches) == [1, "norm", 1, 2]
    first, _, (of_beside, _), (of_mlp, _) = launches
    assert last is states
    assert first[0]["stages"][0]["of"][0]["y"] == launches[1][1][0].data_ptr()
    assert of_beside["stages"][0]["of"]["y"].tolist() == where(*beside)
    assert of_mlp["stages"][1]["of"][0]["y"] == states.data_ptr()


def test_launches_of_matrices_beside_a_gate_are_told(launches: list) -> None:
    products = parallel(64, 96, 32)

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
