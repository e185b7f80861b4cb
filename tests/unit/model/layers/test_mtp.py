"""MTP blocks against transformers', one token behind the model's and chained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from mtp_checkpoints import with_block
from tiny import make_tiny

from exl2flow.model import CanonicalTensors, build_embedding, build_head, resolve
from exl2flow.model.config.mtp import mtp_of
from exl2flow.model.layers.mtp import build_mtp

TOKENS, DEPTH = 12, 4


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
