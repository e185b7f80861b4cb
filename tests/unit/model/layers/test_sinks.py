"""Sinks of attention, from the file to the rule."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from conversions import small_config
from decoders import build_decoder
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE

from exl2flow.core.errors import MissingTensor, NonFiniteState, TensorShapeError
from exl2flow.model import CanonicalTensors, expected_tensors, resolve
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.sublayers import build_sublayer
from exl2flow.model.tensor_parallel.ranks import Ranks
from exl2flow.model.tensor_parallel.shards import join_sublayer
from exl2flow.quant.allocate.layout import plain_tensors
from exl2flow.quant.walk.source_model import SourceModel

NAME = "model.layers.1.self_attn.sinks"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint("gpt-oss", tmp_path)


def put(source: Path, sinks: torch.Tensor | None) -> Path:
    path = source / "model.safetensors"
    tensors = load_file(path)
    del tensors[NAME]
    save_file(tensors if sinks is None else tensors | {NAME: sinks}, path)
    return source


def attention(source: Path) -> AttentionSublayer:
    spec = resolve(source)
    layer = next(s for s in spec.sublayers if s.layer_index == 1 and s.has_attention)
    built = build_sublayer(spec, layer, CanonicalTensors(spec), dtype=torch.float16, device="cpu")
    assert isinstance(built, AttentionSublayer)
    return built


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_they_are_stored_plain_and_read_in_fp32(dtype: torch.dtype, source: Path) -> None:
    sinks = torch.tensor([-1.5, 0.25, 3.0, 7.75], dtype=dtype)

    found = attention(put(source, sinks)).attention.rule.sinks

    assert found is not None
    assert found.dtype == torch.float32
    assert torch.equal(found, sinks.float())
    assert expected_tensors(resolve(source))[NAME] == plain_tensors(resolve(source))[NAME] == (4,)


@torch.no_grad()
def test_they_change_logits(source: Path) -> None:
    ids = torch.randint(VOCAB_SIZE, (1, 12))
    logits = []
    for value in (-50.0, 2.0):
        spec = resolve(put(source, torch.full((4,), value)))
        model = build_decoder(spec, CanonicalTensors(spec), dtype=torch.float32, device="cpu")
        logits.append(model.forward(ids))

    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_each_rank_has_those_of_its_heads(source: Path) -> None:
    sinks = torch.arange(4.0)
    put(source, sinks)

    for rank in range(2):
        ranks = Ranks(rank=rank, count=2)
        join_sublayer(resolve(source), built := attention(source), ranks)
        found = built.attention.rule.sinks
        assert found is not None
        assert found.tolist() == [2.0 * rank, 2.0 * rank + 1]


def test_missing_ones_are_named(source: Path) -> None:
    with pytest.raises(MissingTensor, match=NAME):
        attention(put(source, None))


def test_another_number_than_heads_is_refused(source: Path) -> None:
    with pytest.raises(TensorShapeError, match=rf"{NAME}.*\(5,\).*\(4,\): one for each head"):
        attention(put(source, torch.ones(5)))


def test_what_is_not_finite_is_named_before_it_is_used(source: Path) -> None:
    put(source, torch.tensor([1.0, float("nan"), 1.0, 1.0]))
    model = SourceModel.open(small_config(source, source.parent / "out"), "cpu")

    with pytest.raises(NonFiniteState, match=rf"{NAME}.*1 of 4 elements"):
        [model.sublayer(s) for s in model.spec.sublayers if s.has_attention]
