"""Conversions of every family's checkpoint, from what transformers wrote to texts."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import CHECKPOINTS, TOWERS, make_checkpoint
from conversions import small_config
from crash import LONG_STAGES, Conditions, Conversion
from decoders import build_decoder
from safetensors.torch import load_file
from stage_runs import prepared, run_until, text_parquet

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.engine.loading.load import load_model
from exl2flow.kernels import FEW_ROWS
from exl2flow.model import CanonicalTensors, expected_tensors, resolve
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.allocate.layout import KEPT
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.quant.refine.stored_model import StoredModel, check_refinement

# One checkpoint for each way to store a model; the others are slow tests, and their layers are
# compared with transformers in `tests/unit/model/config/test_families.py`
CONVERTED = (
    "phi3-tied",  # fused matrices, no head
    "seed-oss-biases",
    "llava",  # a tower beside the text model
    "gemma3",  # norms that add 1, on both sides
    "granite4",  # fused gate and up of a shared MLP
    "nemotron",  # no gate
    "gpt2",  # transposed matrices, positions
    "internlm2",  # query, key and value interleaved, other names
    "qwen3.5",  # states, tensors of other types
    "mixtral",
    "qwen2-moe-dense-layers",
    "dbrx",  # packed experts
    "gpt-oss-mxfp4",  # packed in four bits
)
TUNED = ("cohere2",)
IDS = torch.arange(20)[None]


def slow_but(quick: tuple[str, ...]) -> list[Any]:
    """Return all checkpoints; only the quick ones are tested by `make test`."""
    slow = pytest.mark.slow
    return [name if name in quick else pytest.param(name, marks=slow) for name in CHECKPOINTS]


def tower_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a wrapper that belong to no text model."""
    tensors = load_file(folder / "model.safetensors")
    return {n: t for n, t in tensors.items() if n.startswith(TOWERS.get(name, ("-",)))}


@pytest.mark.parametrize("name", slow_but(CONVERTED))
def test_family_converts_and_loads(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(name, tmp_path / "model", dtype=torch.bfloat16)
    config = prepared(source, bpw=7.0)
    plan = preflight(config, STAGES)

    run_until(config, "compile")

    written = load_file(config.out / "model.safetensors")
    tower = tower_of(name, source)
    assert bool(tower) == (name in TOWERS)
    assert all(torch.equal(written[n], t) and written[n].dtype == t.dtype for n, t in tower.items())
    apart = read_json(config.out / RECORD_FILE).get("not_quantized")
    assert plan.not_quantized == ((apart["tensors"], apart["bytes"]) if apart else (0, 0))
    assert plan.not_quantized == (len(tower), sum(t.nbytes for t in tower.values()))
    assert ("not quantized" in dict(plan.rows())) == bool(tower)
    spec = resolve(config.out)
    plain = {n for n in expected_tensors(spec) if n in written}
    corrections = {s.group.router.correction for s in spec.sublayers if s.group} - {None}
    corrections |= {s.plain[role].name for s in spec.sublayers for role in KEPT & {*s.plain}}
    assert all(written[n].dtype == torch.float16 for n in plain - corrections)
    stored = CanonicalTensors(resolve(source))
    assert all(torch.equal(written[n], stored.read(n)) for n in corrections)
    assert all(written[n].dtype == stored.dtype(n) for n in corrections)
    original = build_decoder(
        resolve(source), CanonicalTensors(resolve(source)), dtype=torch.float32, device="cpu"
    )
    model = load_model(config.out, device="cpu")
    expected, logits = original.forward(IDS), model.decoder.forward(IDS)
    missed, sizes = (logits - expected).norm(dim=-1), expected.norm(dim=-1)
    if spec.has_experts:  # a token whose route changes passes other experts, which are random here
        assert (missed / sizes).median() < 0.15
    else:
        assert missed.norm() < 0.15 * sizes.norm()  # 7 bits per weight
    held = build_decoder(  # as a GPU holds it: quantized, with chains of products
        spec, CanonicalTensors(spec), dtype=torch.float16, device="cpu", packed=True
    )
    packed = held.forward(IDS[:, :FEW_ROWS])
    assert (packed - logits[:, :FEW_ROWS]).norm() < 0.02 * logits.norm()  # fp16


@pytest.mark.parametrize("name", slow_but(TUNED))
def test_family_converts_with_gradients_and_tuning(name: str, tmp_path: Path) -> None:
    tune = {"steps": 2, "tokens": 32, "interval": 1, "held_out_rows": 1}
    source = make_checkpoint(name, tmp_path / "model")
    rows = {"rows": 4, "row_tokens": 64, "measure_rows": 1, "measure_row_tokens": 64}  # 2 of text
    rounding = {"block_steps": 2}
    config = small_config(source, tmp_path / "out", tune=tune, calibration=rows, rounding=rounding)

    run_locally(config)

    record = read_json(config.out / RECORD_FILE)
    assert record["tuning"]
    assert record["predicted_kl"] > 0
    (report,) = tmp_path.rglob("report.md")
    assert ("Not quantized" in report.read_text(encoding="utf-8")) == (name in TOWERS)
    assert load_model(config.out, device="cpu").decoder.forward(IDS).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_family_resumes_after_kills(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(name, tmp_path / "model")
    text = text_parquet(tmp_path / "text.parquet")
    options = ("--calibration", str(text), "--measure-rows", "1")
    whole = Conversion.inside(tmp_path / "whole", source, *options)
    whole.finish()
    conversion = whole.after("tokenize", tmp_path / "killed")
    random = Random(name)
    inside = 0

    for stage in LONG_STAGES:
        cursor = random.randrange(1, whole.manifest(stage)["total"])
        seconds = random.choice((None, 0.0))  # states: none in time, or after each sublayer
        slow_disk = Conditions(flush_seconds=0.03, states_seconds=seconds)
        conversion.kill(stage, cursor=cursor, conditions=slow_disk)
        inside += conversion.manifest(stage)["status"] == "partial"
    conversion.finish()

    assert inside == len(LONG_STAGES), name
    assert conversion.results() == whole.results(), name


def test_target_in_bytes_includes_the_tower(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3-vl", tmp_path / "model", dtype=torch.bfloat16)
    tower = sum(t.nbytes for t in tower_of("qwen3-vl", source).values())
    target = tower + 150_000
    config = prepared(source, bpw=None, target_bytes=target, head_bits=6)

    run_until(config, "compile")

    size = (config.out / "model.safetensors").stat().st_size
    assert target - 10_000 < size <= target


def test_reference_of_a_refinement_may_be_fused(tmp_path: Path) -> None:
    source = make_checkpoint("phi3", tmp_path / "model")
    config = prepared(source, bpw=7.0)
    run_until(config, "compile")
    refinement = RefinementConfig(source=source, model=config.out, out=tmp_path / "refined")
    check_refinement(refinement)
    stored = StoredModel.open(refinement, "cpu")

    built = stored.with_reference().sublayer(stored.spec.sublayers[0])

    fused = load_file(source / "model.safetensors")["model.layers.0.self_attn.qkv_proj.weight"]
    assert torch.equal(built.linears["v_proj"].weight, fused[96:])
