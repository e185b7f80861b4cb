"""Configs and tensors of layers with a state, and what is wrong with them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from decoders import build_decoder
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import Exl2FlowError
from exl2flow.model import CanonicalTensors, Decoder, resolve
from exl2flow.model.config.delta_spec import DeltaSpec
from exl2flow.model.config.spec import AttentionSpec


def built(folder: Path) -> Decoder:
    spec = resolve(folder)
    return build_decoder(spec, CanonicalTensors(spec), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3.5-text", tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def changed(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_each_fourth_layer_attends_unless_the_config_lists_them(folder: Path) -> None:
    changed(folder, layer_types=None, num_hidden_layers=8)
    kinds = [type(layer) for layer in resolve(folder).attentions]
    assert kinds == ([DeltaSpec] * 3 + [AttentionSpec]) * 2

    changed(folder, full_attention_interval=2)
    kinds = [type(layer) for layer in resolve(folder).attentions]
    assert kinds == [DeltaSpec, AttentionSpec] * 4


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"layer_types": ["linear_attention", "mamba"]}, "`layer_types`.*`mamba`"),
        ({"layer_types": ["linear_attention"]}, "`layer_types`.*"),
        ({"layer_types": ["linear_attention"] * 2}, "`layer_types`.* none of 2 layers"),
        ({"layer_types": None}, "`full_attention_interval`.* none of 2 layers"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "multiple of .*, 2"),
        ({"linear_key_head_dim": 64}, "`linear_key_head_dim`.* is 64; only 128"),
        ({"linear_value_head_dim": 256}, "`linear_value_head_dim`.* is 256; only 128"),
        ({"linear_conv_kernel_dim": 3}, "`linear_conv_kernel_dim`.* is 3; only 4"),
    ],
)
def test_configs_that_are_impossible_are_refused(
    folder: Path, values: dict[str, object], told: str
) -> None:
    changed(folder, **values)
    with pytest.raises(Exl2FlowError, match=told):
        resolve(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("linear_attn.A_log", (3,)),
        ("linear_attn.dt_bias", (1,)),
        ("linear_attn.conv1d.weight", (512, 1, 3)),
        ("linear_attn.norm.weight", (64,)),
        ("linear_attn.in_proj_b.weight", (2, 32)),
        ("linear_attn.in_proj_qkv.weight", (500, 64)),
    ],
)
def test_tensors_of_another_shape_are_named(
    folder: Path, name: str, shape: tuple[int, ...]
) -> None:
    path, name = folder / "model.safetensors", f"model.layers.0.{name}"
    save_file(load_file(path) | {name: torch.zeros(shape)}, path)
    with pytest.raises(Exl2FlowError, match=name.removesuffix(".weight")):
        built(folder)


@pytest.mark.parametrize("value", [float("nan"), 100.0])
def test_decays_that_are_not_finite_are_named(folder: Path, value: float) -> None:
    path, name = folder / "model.safetensors", "model.layers.0.linear_attn.A_log"
    save_file(load_file(path) | {name: torch.full((2,), value)}, path)
    with pytest.raises(Exl2FlowError, match=name):
        built(folder)


def test_a_gate_of_another_size_is_named(folder: Path) -> None:
    path, name = folder / "model.safetensors", "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][: len(tensors[name]) // 2].clone()}, path)
    with pytest.raises(Exl2FlowError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        built(folder)


@pytest.mark.parametrize(
    ("extension", "told"),
    [
        (["linear_attention"], ""),
        (["linear_attention", "latent"], "`latent`"),
        ("latent", "`latent`"),
    ],
)
def test_extensions_that_are_unknown_are_refused(
    folder: Path, extension: object, told: str
) -> None:
    changed(folder, quantization_config={"quant_method": "exl2", "extension": extension})
    if not told:
        assert resolve(folder).extension == ("linear_attention",)
        return
    with pytest.raises(Exl2FlowError, match=f"{told}.*update exl2flow"):
        resolve(folder)
