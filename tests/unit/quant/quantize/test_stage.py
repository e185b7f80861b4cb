"""Quantizing: what each sublayer sees, what its file says, the head, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_runs import read_factors
from roundings import make_singular, to_nearest
from safetensors.torch import load_file, save_file
from stage_runs import prepared, run_until
from tiny import make_tiny

from exl2flow.core.errors import NonFiniteState, ReconstructionMismatch
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.files import read_json, read_tensors
from exl2flow.core.store.store import StageFolder
from exl2flow.kernels import get_ops
from exl2flow.model import QuantizedLinear, QuantizedMatrix, QuantParams, Sublayer, resolve
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.measure.candidates import HEAD_PARAMS
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, read_report, result_files, sublayer_file
from exl2flow.quant.quantize.stored_form import Packed, reconstruction_digest
from exl2flow.quant.rounding.descent import Metric, refine
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    padded_weight,
    round_matrices,
)
from exl2flow.quant.rounding.hessian import (
    HessianSum,
    MixedHessian,
    collect_hessians,
    factor,
    mixed,
)
from exl2flow.quant.sensitivity.fisher import Factors
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.walk.source_model import SourceModel


@pytest.fixture
def config(tmp_path: Path) -> ConversionConfig:
    """A conversion of one layer that need not measure and has no gradients."""
    source = make_tiny("qwen2", tmp_path / "model", num_hidden_layers=1)
    return prepared(source, bpw=5.0, quality="fast", sensitivity={"kind": "error"})


@pytest.fixture(params=["standard", "exllamav2"])
def either(request: pytest.FixtureRequest) -> Any:
    """A conversion with the defaults, or by the original algorithm."""
    name = "converted" if request.param == "standard" else "converted_as_exllamav2"
    return request.getfixturevalue(name)


def stored(folder: Path, sublayer: Sublayer) -> dict[str, QuantizedMatrix]:
    """Return projection → matrix of a sublayer's file."""
    tensors = read_tensors(folder / sublayer_file(sublayer.spec))
    return {p.name: QuantizedMatrix.from_tensors(p.key, tensors) for p in sublayer.spec.projections}


def install(sublayer: Sublayer, matrices: dict[str, QuantizedMatrix]) -> None:
    for p in sublayer.spec.projections:
        sublayer.linears[p.name] = QuantizedLinear(
            matrices[p.name], out_features=p.out_features, dtype=torch.float32, device="cpu"
        )


def codes_of(matrix: QuantizedMatrix) -> torch.Tensor:
    return get_ops("cpu").unpack(matrix.packed, matrix.groups)


def original(
    weight: torch.Tensor, params: QuantParams, hessian: torch.Tensor, *, feedback: bool = True
) -> RoundedMatrix:
    """Round as exllamav2 does: its damping, one multiplier per group, and nothing after that."""
    item = factor(MixedHessian.plain(hessian), damping=0.12, name="")
    item = item if feedback else to_nearest(item)
    return next(round_matrices([RoundingJob(weight=weight, params=params)], item, search="grid"))


def refined(
    weight: torch.Tensor, params: QuantParams, hessian: torch.Tensor, factors: Factors
) -> RoundedMatrix:
    """Round with the defaults: in the outputs' metric, with rounds of refinement."""
    item = factor(mixed(hessian, factors.input, 0.5), damping=0.05, name="")
    output = factors.output.damped(0.3).blocks
    job = RoundingJob(weight=weight, params=params, output=output)
    start = next(round_matrices([job], item, search="column"))
    metric = Metric(hessian=item.hessian.matrix(), output=output)
    return refine(start, weight, metric, rounds=3, sweeps=2)


def codes_for(
    either: Any, key: str, weight: torch.Tensor, hessian: torch.Tensor, index: int | str
) -> torch.Tensor:
    """Return the codes that a projection of a sublayer has by the formulas."""
    params = read_choice(either.path("allocate"))[key]
    if either.config.quality == "exllamav2":
        return original(weight, params, hessian).codes
    factors = read_factors(either.path("sensitivity"), index)  # type: ignore[arg-type]  # "head"
    return refined(weight, params, hessian, factors[key.rpartition(".")[2]]).codes


def sublayer_codes(either: Any, sublayer: Sublayer, states: torch.Tensor) -> list[torch.Tensor]:
    """Return the codes that the projections have by the formulas for these states."""
    hessians, _ = collect_hessians(sublayer, states)
    return [
        codes_for(
            either,
            p.key,
            padded_weight(sublayer.linears[p.name]),
            hessians[p.capture],
            sublayer.spec.index,
        )
        for p in sublayer.spec.projections
    ]


def quantized_states(converted: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states after `count` sublayers, of the quantized and of the source model."""
    model = SourceModel.open(converted.config, "cpu")
    states = model.initial_states(load_rows(converted.path("tokenize"), "quantize"))
    reference = states.clone()
    for spec in model.spec.sublayers[:count]:
        sublayer = model.sublayer(spec)
        reference = sublayer(reference)
        install(sublayer, stored(converted.path("quantize"), sublayer))
        states = sublayer(states)
    return states, reference


@pytest.mark.parametrize("index", [0, 1, 3])
@torch.inference_mode()
def test_sublayer_is_rounded_for_the_states_of_the_quantized_model(index: int, either: Any) -> None:
    model = SourceModel.open(either.config, "cpu")
    sublayer = model.sublayer(model.spec.sublayers[index])
    states, reference = quantized_states(either, index)

    found = [codes_of(m) for m in stored(either.path("quantize"), sublayer).values()]

    for_quantized, for_source = (sublayer_codes(either, sublayer, x) for x in (states, reference))
    shares = [
        [float((a != b).float().mean()) for a, b in zip(found, expected, strict=True)]
        for expected in (for_quantized, for_source)
    ]
    # fp32 sums of rows one by one or together may move single codes by one
    assert max(shares[0]) < 0.01
    assert (max(shares[1]) > 0.03) == (index > 0)


@torch.inference_mode()
def test_report_of_a_sublayer_states_bits_errors_and_reconstructions(either: Any) -> None:
    model = SourceModel.open(either.config, "cpu")
    choice = read_choice(either.path("allocate"))
    sublayer = model.sublayer(model.spec.sublayers[1])
    states, _ = quantized_states(either, 1)
    reference = sublayer(states)
    weights = {name: padded_weight(linear) for name, linear in sublayer.linears.items()}
    inputs = sublayer.reads(states)
    matrices = stored(either.path("quantize"), sublayer)

    report = read_report(either.path("quantize") / sublayer_file(sublayer.spec))

    install(sublayer, matrices)
    errors = [(y - r).norm() / r.norm() for y, r in zip(sublayer(states), reference, strict=True)]
    assert report.name == "model.layers.0.mlp"
    # sums in fp32 over rows one by one or together
    assert report.rel_err == pytest.approx(float(sum(errors)) / len(errors), rel=1e-3)
    assert report.bits == sum(matrix.total_bits for matrix in matrices.values())
    assert report.bpw == sum(matrix.total_bits for matrix in matrices.values()) / (3 * 64 * 96)
    for p, entry in zip(sublayer.spec.projections, report.matrices, strict=True):
        assert (entry.name, entry.key) == (p.name, p.key)
        assert entry.params == str(choice[p.key])
        matrix = matrices[p.name]
        assert entry.bits == matrix.total_bits
        assert entry.sha256 == reconstruction_digest(matrix.dequantize())
        assert entry.bpw == matrix.total_bits / matrix.dequantize().numel()
        x = inputs[p.capture]
        error = (x @ (weights[p.name] - matrix.dequantize(torch.float32))).norm()
        expected = float(error / (x @ weights[p.name]).norm())
        assert entry.rel_err == pytest.approx(expected, rel=1e-2)


@torch.inference_mode()
def head_problem(either: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head's weight and Hessian for the final states of the quantized model."""
    head = SourceModel.open(either.config, "cpu").head()
    states, _ = quantized_states(either, 4)
    total = HessianSum(64)
    for row in states:
        total.add(head.final_norm(row[None]))
    n = padded_columns(either.spec.vocab_size)
    weight = torch.zeros(64, n)
    weight[:, : either.spec.vocab_size] = head.linear.weight.T
    return weight, total.mean()


def stored_head(folder: Path) -> QuantizedMatrix:
    return QuantizedMatrix.from_tensors("lm_head", read_tensors(folder / HEAD_FILE))


@torch.inference_mode()
def test_head_is_rounded_for_the_final_norm_of_the_quantized_model(either: Any) -> None:
    weight, hessian = head_problem(either)

    found = stored_head(either.path("quantize"))

    expected = codes_for(either, "lm_head", weight, hessian, "head")
    assert found.shape == (64, 320)  # 301 columns padded
    assert found.groups == HEAD_PARAMS[6].groups(64)
    assert float((codes_of(found) != expected).float().mean()) < 0.01
    assert not found.dequantize()[:, 301:].any()


def test_biases_are_stored_in_fp16_with_padding(config: ConversionConfig) -> None:
    folder = run_until(config, "quantize").path("quantize")

    tensors = read_tensors(folder / "sublayers/0000.attention.safetensors")
    source = load_file(config.source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(tensors[name], source[name].half())
    assert "model.layers.0.self_attn.o_proj.bias" not in tensors
    assert [path.name for path in sorted((folder / "sublayers").iterdir())] == [
        "0000.attention.safetensors",
        "0001.mlp.safetensors",
        "head.safetensors",
    ]
    assert result_files(resolve(config.source)) == [
        "sublayers/0000.attention.safetensors",
        "sublayers/0001.mlp.safetensors",
        HEAD_FILE,
    ]


def test_bits_of_all_sublayers_are_those_allotted(either: Any) -> None:
    allocation = read_json(either.path("allocate") / ALLOCATION_FILE)
    files = [sublayer_file(sublayer) for sublayer in either.spec.sublayers]

    reports = [read_report(either.path("quantize") / name) for name in files]

    assert sum(report.bits or 0 for report in reports) == allocation["used_bits"]


def test_remedy_is_recorded_and_the_run_goes_on(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_singular(monkeypatch)

    pipeline = run_until(config, "quantize")

    ref = pipeline.refs["quantize"]
    folder = StageFolder.load(pipeline.path("quantize"), ref.fingerprint)
    assert folder is not None
    captures = [
        f"model.layers.0.{part}.{capture}"
        for part in ("self_attn", "mlp")
        for capture in ("input", "inner")
    ]
    expected = [f"{name}: identity Hessian" for name in (*captures, "lm_head")]
    assert sorted(folder.manifest.notes) == sorted(expected)
    for name in result_files(resolve(config.source)):
        for entry in read_report(folder.path / name).matrices:
            assert 0 < (entry.rel_err or 0) < 0.5


def test_tensors_that_decode_to_something_else_are_refused(converted: Any) -> None:
    class Careless(RoundedMatrix):
        def pack(self, bias: torch.Tensor | None) -> QuantizedMatrix:
            packed = super().pack(bias)
            return replace(packed, packed=packed.packed ^ 1)

    model = SourceModel.open(converted.config, "cpu")
    projection = model.spec.sublayers[0].projections[0]
    sublayer = model.sublayer(model.spec.sublayers[0])
    hessian = torch.eye(64)
    good = original(padded_weight(sublayer.linears["q_proj"]), HEAD_PARAMS[4], hessian)
    bad = Careless(**{name: getattr(good, name) for name in RoundedMatrix.__slots__})
    linear = sublayer.linears["q_proj"]

    packed = Packed(projection, linear, good, hessian)

    report = packed.report(packed.tensors())
    assert report.sha256 == reconstruction_digest(packed.matrix.dequantize())
    packed = Packed(projection, linear, bad, hessian)
    with pytest.raises(ReconstructionMismatch, match=f"`{projection.key}` do not decode"):
        packed.report(packed.tensors())


def test_weight_that_is_not_finite_stops_the_run_and_keeps_what_is_done(
    config: ConversionConfig,
) -> None:
    path = config.source / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, path)

    with pytest.raises(NonFiniteState, match=r"mlp\.up_proj\.weight"):
        run_until(config, "quantize")

    done = list(config.work_dir_root.glob("*/quantize/*/sublayers/*"))
    assert [file.name for file in done] == ["0000.attention.safetensors"]
