"""MTP blocks against transformers', one token behind the model's and chained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, reference_model
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from exl2flow.model import CanonicalTensors, build_embedding, build_head, resolve
from exl2flow.model.config.mtp import mtp_of
from exl2flow.model.layers.mtp import build_mtp

NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "mtp_block.": "layers.0.",
    "post_norm.": "norm.",
}
TOKENS, DEPTH = 12, 4


def with_block(name: str, folder: Path) -> tuple[Path, Any, MtpModel]:
    """Write a checkpoint with a block; return it, and transformers' model and block."""
    source = make_checkpoint(name, folder)
    model = reference_model(name, source)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    block = MtpModel(model, 1).eval()
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    for key, parameter in block.layers[0].named_parameters():
        with torch.no_grad():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * noise.shape[-1] ** -0.5)
        tensors |= {f"mtp.{n}": t for n, t in stored(key, parameter.detach())}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source, model, block


def stored(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors as published files have them, each expert by itself."""
    for theirs, ours in NAMES.items():
        key = ours + key.removeprefix(theirs) if key.startswith(theirs) else key
    start, _, last = key.rpartition(".")
    if tensor.dim() != 3:
        yield key, tensor.clone()
        return
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    for expert, matrix in enumerate(tensor):
        for part, weight in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{start}.{expert}.{part}.weight", weight.clone()


@pytest.mark.parametrize("name", ["qwen3.5-text", "qwen3.5-moe-text", "qwen3-next"])
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


def test_a_file_has_all_tensors_of_its_block(tmp_path: Path) -> None:
    source, _, _ = with_block("qwen3.5-text", tmp_path / "model")
    found = mtp_of(resolve(source))
    assert found is not None

    stored = {n: tuple(t.shape) for n, t in load_file(source / "model.safetensors").items()}

    assert found.tensors == {n: s for n, s in stored.items() if n.startswith("mtp.")}
