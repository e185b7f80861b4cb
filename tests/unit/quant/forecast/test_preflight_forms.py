"""Sources that are quantized already: what is decoded, what is refused, and the way out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import small_config
from fp8_models import make_fp8, set_config
from gptq_models import as_gptq
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from exl2flow.core.errors import PreflightFailed
from exl2flow.model import TensorFiles, resolve
from exl2flow.model.files.source_tensors import source_form
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.preflight import preflight

Tensors = dict[str, torch.Tensor]
KEY = "model.layers.1.mlp.down_proj"


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    source = make_tiny("llama", tmp_path / "gptq")
    as_gptq(source, bias=0.0)
    return source


def change(source: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, source / "model.safetensors")


def refusal(source: Path, **values: object) -> str:
    with pytest.raises(PreflightFailed) as raised:
        preflight(small_config(source, source.parent / "out", **values), STAGES)
    return str(raised.value)


def test_an_fp8_source_has_the_plan_of_its_twin(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "blocks, e8m0")

    found, twin = (
        preflight(small_config(folder, tmp_path / "out", tune={"steps": 1}), STAGES)
        for folder in (source, tmp_path / "plain")
    )

    assert (found.weights, found.needs) == (twin.weights, twin.needs)


def test_fp8_weights_without_scales_are_all_listed(tmp_path: Path) -> None:
    source = make_fp8(tmp_path, "channels (n, 1)", num_hidden_layers=1)
    change(source, lambda tensors: [tensors.pop(n) for n in [*tensors] if n.endswith("t_scale")])

    lines = refusal(source).splitlines()

    assert len(lines) == 7
    assert all("is fp8, and its scales" in line for line in lines)


def test_gptq_is_refused_with_the_option_that_accepts_it(gptq: Path) -> None:
    message = refusal(gptq)

    assert "is quantized already (`model.layers.0.self_attn.q_proj`, 14 matrices" in message
    assert "or give `--lossy-source` to round its decoded values once more" in message


def test_gptq_is_accepted_on_request(gptq: Path) -> None:
    preflight(small_config(gptq, gptq.parent / "out", lossy_source=True), STAGES)

    assert source_form(resolve(gptq), TensorFiles(gptq)) == "gptq"


@pytest.mark.parametrize("lossy", [False, True])
def test_fused_matrices_in_gptq_form_are_refused(gptq: Path, lossy: bool) -> None:
    name = "model.layers.0.self_attn.qkv_proj.qweight"
    change(gptq, lambda tensors: tensors.update({name: tensors[f"{KEY}.qweight"] + 1}))

    assert f"`{name}` (GPTQ) is not a single matrix" in refusal(gptq, lossy_source=lossy)


def no_zeros(tensors: Tensors) -> None:
    del tensors[f"{KEY}.qzeros"]


def infinite(tensors: Tensors) -> None:
    tensors[f"{KEY}.scales"][0, 0] = float("inf")


def biased(tensors: Tensors) -> None:
    tensors[f"{KEY}.bias"][3] = 0.5


def eight_bits(tensors: Tensors) -> None:
    tensors[f"{KEY}.qweight"] = tensors[f"{KEY}.qweight"].repeat(2, 1)
    tensors[f"{KEY}.g_idx"] = tensors[f"{KEY}.g_idx"].repeat(2)
    tensors[f"{KEY}.scales"] = tensors[f"{KEY}.scales"].repeat(2, 1)
    tensors[f"{KEY}.qzeros"] = tensors[f"{KEY}.qzeros"].repeat(2, 1)
    tensors[f"{KEY}.g_idx"][96:] += 3


def far_group(tensors: Tensors) -> None:
    tensors[f"{KEY}.g_idx"][0] = 9


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_zeros, f"`{KEY}.qzeros` is missing"),
        (infinite, f"`{KEY}.scales` holds NaN, infinity"),
        (biased, f"`{KEY}.bias` is not zero, the config implies none"),
        (eight_bits, f"`{KEY}` holds (192, 64) codes of 4 bits, the config implies (96, 64)"),
        (far_group, f"`{KEY}.g_idx` does not divide"),
    ],
)
def test_a_gptq_matrix_that_cannot_be_decoded_is_named(
    gptq: Path, spoil: Callable[[Tensors], None], message: str
) -> None:
    change(gptq, spoil)
    assert message in refusal(gptq, lossy_source=True)


def test_awq_is_refused_by_name(gptq: Path) -> None:
    set_config(gptq, quantization_config={"quant_method": "awq", "bits": 4})

    message = refusal(gptq, lossy_source=True)

    assert "_proj.qweight`, AWQ), and this form cannot be decoded; convert the model" in message


@pytest.mark.parametrize(
    ("suffix", "form"),
    [
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("weight.absmax", "bitsandbytes"),
        ("SCB", "bitsandbytes"),
        ("weight_packed", "compressed-tensors"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, suffix: str, form: str) -> None:
    source = make_tiny("llama", tmp_path / "model")
    change(source, lambda tensors: tensors.update({f"{KEY}.{suffix}": torch.ones(3)}))

    assert f"(`{KEY}.{suffix}`, {form})" in refusal(source, lossy_source=True)


def test_exl2_is_refused_and_refine_is_named(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model")
    change(source, lambda tensors: tensors.update({f"{KEY}.q_weight": torch.ones(3)}))

    message = refusal(source, lossy_source=True)

    assert "EXL2); convert the model that it was made from, or improve this one with" in message
    assert "`exl2flow refine`" in message


def test_only_conversions_measurements_and_sweeps_take_lossy_sources() -> None:
    from exl2flow.core.options.measure import MeasureConfig
    from exl2flow.core.options.refine import RefinementConfig
    from exl2flow.core.options.sweep import SweepConfig

    given = {"source": "model", "out": "out.json", "lossy_source": True}
    assert MeasureConfig.model_validate(given).conversion().lossy_source
    assert SweepConfig.model_validate({**given, "bpw": [4]}).conversion(4).lossy_source
    assert "lossy_source" not in RefinementConfig.model_fields
