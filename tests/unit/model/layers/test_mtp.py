"""MTP blocks against transformers', one token behind the model's and chained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, reference_model
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from transformers.modeling_layers import MtpModel

from exl2flow.model import CanonicalTensors, build_embedding, build_head, resolve
from exl2flow.model.config.mtp import mtp_of
from exl2flow.model.layers.mtp import build_mtp

QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "mtp_block.": "mtp.layers.0.",
    "post_norm.": "mtp.norm.",
}
GLM = {
    "post_norm.": "model.layers.2.shared_head.norm.",
    "mtp_block.": "model.layers.2.",
    "": "model.layers.2.",
}
TOKENS, DEPTH = 12, 4


def with_block(name: str, folder: Path) -> tuple[Path, Any, MtpModel]:
    """Write a checkpoint with a block; return it, and transformers' model and block."""
    source = make_checkpoint(name, folder)
    model = reference_model(name, source)
    is_layer = name == "glm4-moe"
    model.config.num_mtp_layers = 1
    if not is_layer:
        model.config.mtp_layer_types = ["full_attention"]
    block = MtpModel(model, 1).eval()
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    layer = block.layers[0]
    for key, parameter in [*layer.named_parameters(), *layer.named_buffers()]:
        with torch.no_grad():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * noise.shape[-1] ** -0.5)
        tensors |= stored(key, parameter.detach(), GLM if is_layer else QWEN)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source, model, block


def stored(key: str, tensor: torch.Tensor, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return a parameter as published files have it, each expert by itself."""
    begin = next(theirs for theirs in names if key.startswith(theirs))
    start, _, last = (names[begin] + key.removeprefix(begin)).rpartition(".")
    if tensor.dim() != 3:
        return {f"{start}.{last}": tensor.clone()}
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    return {
        f"{start}.{expert}.{part}.weight": weight.clone()
        for expert, matrix in enumerate(tensor)
        for part, weight in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


@pytest.mark.parametrize("name", ["qwen3.5-text", "qwen3.5-moe-text", "qwen3-next", "glm4-moe"])
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    source, model, reference = with_block(name, tmp_path / "model")
    spec = resolve(source)
    found = mtp_of(spec)
    assert found is not None
    tensors = CanonicalTensors(found.layer)
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    whole = CanonicalTensors(spec)
    block = build_mtp(
        found,
        tensors,
        embedding=build_embedding(spec, whole, **options),
        head=build_head(spec, whole, **options),
        **options,
    )
    ids = torch.randint(0, spec.vocab_size, (1, TOKENS + DEPTH))
    hidden = model.model(ids[:, :TOKENS]).last_hidden_state

    theirs = ours = hidden
    for depth in range(DEPTH):  # every token behind the known states has one of the block's own
        next_ids = ids[:, 1 : 1 + TOKENS + depth]
        places = torch.arange(TOKENS + depth)[None]
        made = reference.forward_layer(0, theirs, places, None, input_ids=next_ids)
        states = block.states(next_ids, ours)
        torch.testing.assert_close(
            block.head.logits(states), model.lm_head(made), atol=1e-4, rtol=1e-4
        )
        theirs = torch.cat([theirs, made[:, -1:]], dim=1)
        ours = torch.cat([ours, states[:, -1:]], dim=1)


@pytest.mark.parametrize("name", ["qwen3.5-text", "glm4-moe"])
def test_a_file_has_all_tensors_of_its_block(name: str, tmp_path: Path) -> None:
    source, _, _ = with_block(name, tmp_path / "model")
    found = mtp_of(resolve(source))
    assert found is not None

    tensors = CanonicalTensors(found.layer)

    ours = {n: tensors.shape(n) for n in tensors.names if n.startswith("mtp.")}
    assert found.tensors == ours


def test_other_models_have_none(tmp_path: Path) -> None:
    spec = resolve(make_checkpoint("glm4-moe", tmp_path / "model"))

    assert mtp_of(replace(spec, drafting_layers=0)) is None
    assert mtp_of(resolve(make_tiny("llama", tmp_path / "llama"))) is None
