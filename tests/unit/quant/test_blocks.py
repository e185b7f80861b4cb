"""Conversions of blocks that are not Llama's, from measuring to the written model."""

from pathlib import Path

import pytest
import torch
from blocks import ROWS, add_rows, block_config, make_block
from conversions import small_config
from decoders import build_decoder
from refinements import refine_until, refinement, rough_model
from safetensors.torch import load_file
from stage_runs import calibrated_on, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import CanonicalTensors, DenseLinear, TensorFiles, expected_tensors, resolve
from exl2flow.model.files.exl2 import is_quantized
from exl2flow.quant.judge.stage import JUDGEMENT_FILE
from exl2flow.quant.measure.candidates import candidates_for
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE, read_measurement
from exl2flow.quant.rounding.error_feedback import RoundingJob, padded_weight, round_matrices
from exl2flow.quant.rounding.hessian import HessianSum, MixedHessian, factor
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.walk.source_model import SourceModel

IDS = torch.arange(20)[None] * 3
KINDS: dict[str, dict[str, object]] = {
    "error": {"quality": "exllamav2", "head_bits": 8},
    "fisher": {
        "quality": "standard",
        "sensitivity": {"rows": 2},
        "tune": {"steps": 4, "tokens": 32, "interval": 2, "held_out_rows": 1},
    },
}


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rows(monkeypatch)


def converted(name: str, root: Path, kind: str, bpw: float) -> Pipeline:
    calibration = calibrated_on(text_parquet(root / "text.parquet"), (4, 64), (2, 64))
    source = make_tiny("llama", root / "model", num_hidden_layers=1, **block_config(name))
    values = {"bpw": bpw, "calibration": calibration, **KINDS[kind]}
    return run_until(small_config(source, root / "out", **values), "compile")


@pytest.mark.parametrize("kind", [pytest.param("error", marks=pytest.mark.slow), "fisher"])
@pytest.mark.parametrize("name", ROWS)
def test_block_converts_and_loads_packed_or_decoded(name: str, kind: str, tmp_path: Path) -> None:
    pipeline = converted(name, tmp_path, kind, 6.0)

    out = tmp_path / "out"
    spec, written = resolve(out), load_file(out / "model.safetensors")
    for sublayer in spec.sublayers:
        assert all(is_quantized(p.key, written) for p in sublayer.projections)
        assert all(name in written for norm in sublayer.norms for name in norm.names)
    assert ("tune" in pipeline.stages) == (kind == "fisher")
    source = resolve(tmp_path / "model")
    original = build_decoder(
        source, CanonicalTensors(source), dtype=torch.float32, device="cpu"
    ).forward(IDS)
    files = CanonicalTensors(spec)
    decoded = build_decoder(spec, files, dtype=torch.float32, device="cpu").forward(IDS)
    packed = build_decoder(spec, files, dtype=torch.float16, device="cpu", packed=True).forward(IDS)
    assert (decoded - original).norm() < 0.25 * original.norm()
    assert (packed - decoded).norm() < 0.02 * decoded.norm()


@pytest.mark.parametrize("name", ROWS)
def test_block_is_refined_towards_its_source(name: str, tmp_path: Path) -> None:
    source, model = rough_model(tmp_path, "llama", num_hidden_layers=1, **block_config(name))

    pipeline = refine_until(refinement(source, model, tmp_path / "out"), "judge")

    judgement = read_json(pipeline.path("judge") / JUDGEMENT_FILE)
    assert judgement["refined"]
    assert judgement["kl_after"] < 0.9 * judgement["kl_before"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["after", "capped"])
def test_tuning_trains_norms_as_they_are_stored(name: str, tmp_path: Path) -> None:
    converted(name, tmp_path, "fisher", 4.0)

    spec = resolve(tmp_path / "out")
    source, written = (load_file(tmp_path / f / "model.safetensors") for f in ("model", "out"))
    norms = [norm for sublayer in spec.sublayers for norm in sublayer.norms]
    for norm in (*norms, spec.final_norm):
        weight = f"{norm.key}.weight"
        change = written[weight].float() - source[weight]
        assert 0 < change.abs().max() < 0.1  # neither an offset nor a multiplier is in the file
        if norm.has_bias:
            bias = f"{norm.key}.bias"
            assert torch.equal(written[bias], source[bias].half())


@torch.inference_mode()
def test_parts_of_a_parallel_block_are_measured_beside_the_unquantized_other(
    tmp_path: Path,
) -> None:
    pipeline = converted("parallel", tmp_path, "error", 4.0)
    spec = resolve(tmp_path / "model")
    path = pipeline.path("measure") / MEASUREMENT_FILE

    found = read_measurement(path, spec)

    block = spec.sublayers[0]
    names = [part.name for sublayer in spec.sublayers for part in sublayer.parts]
    assert list(found.decoder) == names
    assert [name for name in read_json(path)["measurement"] if name in names] == names
    model = SourceModel.open(pipeline.config, "cpu")
    states = model.initial_states(load_rows(pipeline.path("tokenize"), "measure"))
    built = model.sublayer(block)
    own, reference, reads = dict(built.linears), built(states), built.reads(states)
    for part, place in zip(block.parts, (0, 6), strict=True):
        candidate = candidates_for(part)[place]
        for p in part.projections:
            total = HessianSum(p.in_features)
            for row in reads[p.capture]:
                total.add(row)
            item = factor(MixedHessian.plain(total.mean()), damping=0.12, name="")
            job = RoundingJob(weight=padded_weight(own[p.name]), params=candidate[p.name])
            matrix = next(round_matrices([job], item, search="grid")).dequantize()
            built.linears[p.name] = DenseLinear(matrix.float().T[: p.out_features].contiguous())
        pairs = zip(built(states), reference, strict=True)
        errors = [float((y - r).norm() / r.norm()) for y, r in pairs]
        built.linears.update(own)
        result = next(r for r in found.decoder[part.name] if r.params == candidate)
        # fp32 sums in another order may move single codes by one
        assert result.accuracy == pytest.approx(1 - sum(errors) / 2, abs=3e-4)


def test_every_tensor_of_a_block_is_expected(tmp_path: Path) -> None:
    for name in ROWS:
        spec = resolve(make_block(name, tmp_path / name))

        assert set(expected_tensors(spec)) == set(TensorFiles(spec.source_dir).names)
