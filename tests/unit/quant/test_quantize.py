"""Quantizing: what each sublayer sees, what its file says, the head, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import small_config
from safetensors.torch import load_file, save_file
from stage_runs import foreign_measurement, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import NonFiniteState, ReconstructionMismatch
from exl2flow.core.files import read_json, read_tensors
from exl2flow.core.store import StageFolder
from exl2flow.kernels import get_ops
from exl2flow.model import Exl2Linear, QuantizedMatrix, QuantParams, Sublayer, resolve
from exl2flow.model.exl2 import padded_columns
from exl2flow.quant import quantize as quantize_module
from exl2flow.quant.allocate import ALLOCATION_FILE, read_choice
from exl2flow.quant.candidates import HEAD_PARAMS
from exl2flow.quant.gptq import RoundedMatrix, RoundingJob, round_matrices
from exl2flow.quant.hessian import HessianFactor, HessianSum, factor
from exl2flow.quant.measure import collect_hessians, padded_weight
from exl2flow.quant.quantize import (
    HEAD_FILE,
    quantize_projection,
    read_report,
    reconstruction_digest,
    result_files,
    sublayer_file,
)
from exl2flow.quant.source import SourceModel
from exl2flow.quant.tokens import load_rows


@pytest.fixture
def config(tmp_path: Path) -> ConversionConfig:
    """A conversion of one layer that need not measure."""
    source = make_tiny("qwen2", tmp_path / "model", num_hidden_layers=1)
    calibration = {
        "text": text_parquet(tmp_path / "text.parquet"),
        "rows": 2,
        "row_tokens": 32,
        "measure_rows": 1,
        "measure_row_tokens": 32,
    }
    measurement = foreign_measurement(tmp_path / "measurement.json", resolve(source))
    return small_config(
        source, tmp_path / "out", bpw=5.0, calibration=calibration, measurement=measurement
    )


def stored(folder: Path, sublayer: Sublayer) -> dict[str, QuantizedMatrix]:
    """Return projection → matrix of a sublayer's file."""
    tensors = read_tensors(folder / sublayer_file(sublayer.spec))
    return {p.name: QuantizedMatrix.from_tensors(p.key, tensors) for p in sublayer.spec.projections}


def install(sublayer: Sublayer, matrices: dict[str, QuantizedMatrix]) -> None:
    for p in sublayer.spec.projections:
        sublayer.linears[p.name] = Exl2Linear(
            matrices[p.name], out_features=p.out_features, dtype=torch.float32, device="cpu"
        )


def codes_of(matrix: QuantizedMatrix) -> torch.Tensor:
    return get_ops("cpu").unpack(matrix.packed, matrix.groups)


def codes_for(
    sublayer: Sublayer, states: torch.Tensor, choice: dict[str, QuantParams]
) -> dict[str, torch.Tensor]:
    """Return projection → codes that the quantizer gives for these states."""
    hessians, _ = collect_hessians(sublayer, states)
    return {
        p.name: round_matrices(
            [RoundingJob(weight=padded_weight(sublayer.linears[p.name]), params=choice[p.name])],
            factor(hessians[p.capture], name=p.name),
        )[0].codes
        for p in sublayer.spec.projections
    }


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
def test_sublayer_is_rounded_for_the_states_of_the_quantized_model(
    index: int, converted: Any
) -> None:
    model = SourceModel.open(converted.config, "cpu")
    sublayer = model.sublayer(model.spec.sublayers[index])
    choice = read_choice(converted.path("allocate"))[sublayer.spec.name]
    states, reference = quantized_states(converted, index)

    found = {n: codes_of(m) for n, m in stored(converted.path("quantize"), sublayer).items()}

    for_quantized, for_source = (codes_for(sublayer, x, choice) for x in (states, reference))
    shares = [
        [float((codes != expected[name]).float().mean()) for name, codes in found.items()]
        for expected in (for_quantized, for_source)
    ]
    # fp32 sums of rows one by one or together may move single codes by one
    assert max(shares[0]) < 0.01
    assert (max(shares[1]) > 0.03) == (index > 0)


@torch.inference_mode()
def test_report_of_a_sublayer_states_bits_errors_and_reconstructions(converted: Any) -> None:
    model = SourceModel.open(converted.config, "cpu")
    choice = read_choice(converted.path("allocate"))
    sublayer = model.sublayer(model.spec.sublayers[1])
    states, _ = quantized_states(converted, 1)
    reference = sublayer(states)
    weights = {name: padded_weight(linear) for name, linear in sublayer.linears.items()}
    inputs = {"input": sublayer.normed(states)}
    inputs["inner"] = sublayer.inner(inputs["input"])
    matrices = stored(converted.path("quantize"), sublayer)

    report: Any = read_report(converted.path("quantize") / sublayer_file(sublayer.spec))

    install(sublayer, matrices)
    errors = [(y - r).norm() / r.norm() for y, r in zip(sublayer(states), reference, strict=True)]
    assert report["name"] == "model.layers.0.mlp"
    # sums in fp32 over rows one by one or together
    assert report["rel_err"] == pytest.approx(float(sum(errors)) / len(errors), rel=1e-3)
    assert report["bits"] == sum(matrix.total_bits for matrix in matrices.values())
    assert report["bpw"] == report["bits"] / (3 * 64 * 96)
    for p in sublayer.spec.projections:
        entry, matrix = report["projections"][p.name], matrices[p.name]
        assert entry["params"] == str(choice[sublayer.spec.name][p.name])
        assert entry["bits"] == matrix.total_bits
        assert entry["sha256"] == reconstruction_digest(matrix.dequantize())
        assert entry["remedy"] == ""
        x = inputs[p.capture]
        error = (x @ (weights[p.name] - matrix.dequantize(torch.float32))).norm()
        expected = float(error / (x @ weights[p.name]).norm())
        assert entry["rel_err"] == pytest.approx(expected, rel=1e-2)


@torch.inference_mode()
def head_codes(converted: Any, *, feedback: bool) -> torch.Tensor:
    """Return the head's codes for the final states of the quantized model."""
    head = SourceModel.open(converted.config, "cpu").head()
    states, _ = quantized_states(converted, 4)
    total = HessianSum(64)
    for row in states:
        total.add(head.final_norm(row[None]))
    item = factor(total.mean(), name="head")
    item = item if feedback else item.without_feedback()
    n = padded_columns(converted.spec.vocab_size)
    weight = torch.zeros(64, n)
    weight[:, : converted.spec.vocab_size] = head.linear.weight.T
    return round_matrices([RoundingJob(weight=weight, params=HEAD_PARAMS[6])], item)[0].codes


def stored_head(folder: Path) -> QuantizedMatrix:
    return QuantizedMatrix.from_tensors("lm_head", read_tensors(folder / HEAD_FILE))


def test_head_is_rounded_for_the_final_norm_of_the_quantized_model(converted: Any) -> None:
    found = stored_head(converted.path("quantize"))

    expected = head_codes(converted, feedback=True)

    assert found.shape == (64, 320)  # 301 columns padded
    assert found.groups == HEAD_PARAMS[6].groups(64)
    assert float((codes_of(found) != expected).float().mean()) < 0.01
    assert not found.dequantize()[:, 301:].any()


def test_huge_head_is_rounded_to_nearest(
    converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = converted.config.model_copy(update={"work_root": tmp_path / "work"})
    shutil.copytree(converted.config.work_dir_root, tmp_path / "work")
    assert quantize_module.FEEDBACK_LIMIT == 10**9
    monkeypatch.setattr(quantize_module, "FEEDBACK_LIMIT", 301 * 64 - 1)
    folder = (
        tmp_path / "work" / converted.path("quantize").relative_to(converted.config.work_dir_root)
    )
    (folder / HEAD_FILE).unlink()

    run_until(moved, "quantize")

    codes = codes_of(stored_head(folder))
    nearest, fed_back = (head_codes(converted, feedback=f) for f in (False, True))
    assert float((codes != nearest).float().mean()) < 0.01
    assert float((codes != fed_back).float().mean()) > 0.05


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


def test_bits_of_all_sublayers_are_those_allotted(converted: Any) -> None:
    allocation = read_json(converted.path("allocate") / ALLOCATION_FILE)
    files = [sublayer_file(sublayer) for sublayer in converted.spec.sublayers]

    reports = [read_report(converted.path("quantize") / name) for name in files]

    assert sum(report["bits"] for report in reports) == allocation["used_bits"]  # type: ignore[misc]  # JSON


def test_remedy_is_recorded_and_the_run_goes_on(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(hessian: torch.Tensor, *, name: str) -> HessianFactor:
        return factor(torch.full_like(hessian, torch.nan), name=name)

    monkeypatch.setattr(quantize_module, "factor", fail)

    pipeline = run_until(config, "quantize")

    ref = pipeline.refs["quantize"]
    folder = StageFolder.load(pipeline.path("quantize"), ref.fingerprint)
    assert folder is not None
    assert "model.layers.0.mlp.down_proj: identity Hessian" in folder.manifest.notes
    assert "lm_head: identity Hessian" in folder.manifest.notes
    for name in result_files(resolve(config.source)):
        report: Any = read_report(folder.path / name)
        for entry in report["projections"].values():
            assert entry["remedy"] == "identity Hessian"
            assert 0 < entry["rel_err"] < 0.5


def test_tensors_that_decode_to_something_else_are_refused(converted: Any) -> None:
    class Careless(RoundedMatrix):
        def pack(self, bias: torch.Tensor | None) -> QuantizedMatrix:
            packed = super().pack(bias)
            return replace(packed, packed=packed.packed ^ 1)

    model = SourceModel.open(converted.config, "cpu")
    projection = model.spec.sublayers[0].projections[0]
    sublayer = model.sublayer(model.spec.sublayers[0])
    item = factor(torch.eye(64), name="q")
    params = HEAD_PARAMS[4]
    job = RoundingJob(weight=padded_weight(sublayer.linears["q_proj"]), params=params)
    good = round_matrices([job], item)[0]
    bad = Careless(**{name: getattr(good, name) for name in RoundedMatrix.__slots__})
    linear = sublayer.linears["q_proj"]

    packed, report = quantize_projection(projection, linear, good, item)

    assert report["sha256"] == reconstruction_digest(packed.dequantize())
    with pytest.raises(ReconstructionMismatch, match=f"`{projection.key}` do not decode"):
        quantize_projection(projection, linear, bad, item)


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
