"""Random models of benchmarks have the bit widths and groups of `allocations.json`."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.inference import load_model
from exl2flow.kernels import get_ops
from exl2flow.model import CanonicalTensors, QuantizedMatrix, QuantParams

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import products
from allocations import Allocation, allocation_of, chosen, mixed, parsed, tables
from decode import add_model, measure, model_of, write_model
from shapes import linears, write_config

TABLED = [(model, bpw) for model, rates in tables().items() for bpw in rates]


def test_the_table_has_all_models_at_three_bitrates() -> None:
    models = ("demo", "wiki16m", "wiki16m-speed")
    assert sorted(TABLED) == [(model, bpw) for model in models for bpw in ("3.0", "4.0", "5.0")]


def test_layers_of_a_model_for_speed_have_groups_of_128() -> None:
    choices = [
        text
        for roles in tables()["wiki16m-speed"].values()
        for role, texts in roles.items()
        for text in texts
        if role != "head"
    ]

    assert {size for text in choices for size in parsed(text).group_sizes} == {128}


@pytest.mark.parametrize("shape", ["7b", "8b", "70b"])
@pytest.mark.parametrize(("model", "bpw"), TABLED)
def test_a_large_model_has_the_bitrate_of_the_table(
    model: str, bpw: str, shape: str, tmp_path: Path
) -> None:
    spec = write_config(tmp_path / "model", shape)

    found = Allocation.nearest(float(bpw), model).bpw(spec)

    # narrow models spend more bits on permutations, and have other shares of attention
    assert found == pytest.approx(float(bpw), rel=0.05 if model == "demo" else 0.03)


@pytest.mark.parametrize("options", [["--bpw", "4.2"], ["--bpw", "2.5", "--uniform"]])
def test_a_written_model_has_the_groups_of_its_allocation_and_loads(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_model(parser)
    arguments = parser.parse_args(["--shape", "small", "--layers", "3", *options])

    loaded = load_model(model_of(arguments, tmp_path), device="cpu")

    spec, files = loaded.spec, CanonicalTensors(loaded.spec)
    tensors = {name: files.read(name) for name in files.names}
    expected = allocation_of(arguments.bpw, arguments)
    matrices = [QuantizedMatrix.from_tensors(p.key, tensors) for p in linears(spec)]
    for matrix, (projection, params) in zip(matrices, expected.of(spec), strict=True):
        assert matrix.groups == params.groups(projection.in_features)
    bits = sum(matrix.total_bits for matrix in matrices[:-1])
    numel = sum(p.in_features * p.out_features for p in linears(spec)[:-1])
    assert f"{bits / numel:.3f} bits per weight" in capsys.readouterr().out
    assert bits / numel == pytest.approx(expected.bpw(spec), rel=1e-3)
    assert loaded.decoder.forward(torch.tensor([[3, 4]])).isfinite().all()


def test_prompts_and_steps_of_a_written_model_are_timed(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "tiny", None, Allocation.nearest(4))
    model = load_model(tmp_path / "model", device="cpu")

    times = measure(model, 2, 20, "fp32")

    assert len(times) == 4
    assert all(0 < taken < 1 for taken in times)


def test_layers_take_the_choice_at_their_relative_depth() -> None:
    first, second = (QuantParams.uniform(bits, 32) for bits in (3, 5))
    allocation = Allocation(name="", choices={"q": [first, second]})

    found = [allocation.params("q", layer, 5) for layer in range(5)]

    assert found == [first, first, second, second, second]


@pytest.mark.parametrize("bits", [2.0, 2.5, 4.0, 5.3, 7.5, 8.0])
def test_two_widths_average_the_bits_of_uniform_matrices(bits: float) -> None:
    groups = mixed(bits).groups(128 * 100)

    assert {group.rows for group in groups} == {128}
    assert sum(group.bits for group in groups) / 100 == pytest.approx(bits, abs=0.02)


@pytest.mark.parametrize("params", [QuantParams.uniform(4, 128), mixed(2.5), mixed(5.25)])
def test_parameters_are_read_as_a_record_writes_them(params: QuantParams) -> None:
    assert parsed(str(params)) == params


def test_choices_of_a_converted_model_are_listed_by_role_and_layer(tmp_path: Path) -> None:
    spec = write_config(tmp_path / "model", "tiny")
    layers = [
        {
            "name": sublayer.name,
            "projections": {
                p.name: {"params": f"1:{2 + index}b_32g s4"} for p in sublayer.projections
            },
        }
        for index, sublayer in enumerate(spec.sublayers)
    ]
    layers.append({"name": "lm_head", "projections": {"lm_head": {"params": "1:6b_128g s4"}}})
    record = {"options": {"bpw": 4}, "layers": layers}
    (tmp_path / "model" / RECORD_FILE).write_text(json.dumps(record))

    bpw, choices = chosen(tmp_path / "model")

    assert bpw == "4.0"
    assert choices["q"] == choices["o"] == ["1:2b_32g s4", "1:4b_32g s4"]
    assert choices["up"] == choices["down"] == ["1:3b_32g s4", "1:5b_32g s4"]
    assert choices["head"] == ["1:6b_128g s4"]


def test_products_of_a_token_run_with_the_groups_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "DEVICE", "cpu")
    monkeypatch.setitem(products.SHAPES, "tiny", (128, 256, 64, 96, 2))
    allocation = Allocation.nearest(3)

    chains = products.chains("tiny", allocation)

    matrices = [m for chain in chains for product in chain for m in product.matrices]
    assert [len(product.matrices) for chain in chains for product in chain] == [3, 1, 2, 1] * 2 + [
        1
    ]
    assert matrices[7].groups == allocation.params("q", 1, 2).groups(128)
    assert matrices[6].groups == allocation.params("down", 0, 2).groups(256)
    for chain in chains:
        results, _ = get_ops("cpu").multiply(torch.randn(2, 128).half(), chain, torch.zeros(2, 128))
        assert results


@pytest.mark.parametrize(
    ("shape", "steps", "experts"),
    [("qwen3-30b-a3b", 5, 26), ("gpt-oss-20b", 7, 5), ("mixtral-8x7b", 8, 1)],
)
def test_a_layer_of_experts_is_walked_in_steps_of_a_7bs_size(
    shape: str, steps: int, experts: int, tmp_path: Path
) -> None:
    spec = write_config(tmp_path / "model", shape, layers=1)

    groups = [s.group for s in spec.sublayers if s.group is not None]

    assert len(groups) == steps
    assert max(len(group.experts) for group in groups) == experts
    largest = max(sum(p.numel for p in s.projections) for s in spec.sublayers if s.group)
    assert largest <= 2**27 or experts == 1
