"""Positions that differ between layers, and the ways to rotate, against transformers' modules."""

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import near, terms_of
from caches import Sequences
from decoders import build_decoder
from tiny import make_tiny, random_tensors, write_shards
from transformers import AutoConfig

from exl2flow.core.options.config import CalibrationOptions
from exl2flow.kernels import PAGE_TOKENS, AttentionRule
from exl2flow.model import Composition, Decoder, ModelSpec, TensorFiles, resolve
from exl2flow.model.config.family import HeadNorms
from exl2flow.model.config.rope_spec import RopeKind, RopeSpec
from exl2flow.model.config.spec import AttentionSpec
from exl2flow.model.memory.footprint import DeviceNeed, Texts, cache_bytes

HIDDEN = 64
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 301,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
LAYER = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rule=AttentionRule(scale=0.25),
    rope=RopeSpec(kind=RopeKind.DEFAULT, theta=5000.0, rotary_dim=16, original_max_positions=256),
    qkv_bias=False,
    o_bias=False,
)
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
NORMED = {"head_norms": HeadNorms.HEAD}


def with_rope(layer: AttentionSpec, **fields: Any) -> AttentionSpec:
    return replace(layer, rope=replace(layer.rope, **fields))


def spec_of(layers: list[AttentionSpec], folder: Path) -> ModelSpec:
    """Return Llama's spec with layers that attend as given."""
    make_tiny("llama", folder)
    spec, count = resolve(folder), len(layers)
    return replace(spec, attentions=tuple(layers), mlps=spec.mlps[:1] * count, num_layers=count)


def decoder_of(layers: list[AttentionSpec], folder: Path) -> Decoder:
    """Return a random model of Llama's graph whose layers attend as given."""
    spec = spec_of(layers, folder)
    write_shards(folder, random_tensors(spec, dtype=torch.float32, seed=0), shards=1)
    return build_decoder(spec, TensorFiles(folder), dtype=torch.float32, device="cpu")


# what transformers' config and our spec say of one layer
REFERENCES: dict[str, tuple[str, dict[str, Any], AttentionSpec]] = {
    "interleaved": (
        "cohere2",
        {"layer_types": ["sliding_attention"] * 2, "rope_parameters": PLAIN},
        with_rope(LAYER, interleaved=True),
    ),
    "none": ("cohere2", {"layer_types": ["full_attention"] * 2}, with_rope(LAYER, rotary_dim=0)),
    "interleaved-partly": (
        "glm",
        {
            "head_dim": 16,
            "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
            "attention_bias": True,
        },
        replace(with_rope(LAYER, interleaved=True, rotary_dim=8), qkv_bias=True),
    ),
    "query-scale": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
        with_rope(LAYER, kind=RopeKind.YARN, factor=4.0, original_max_positions=16, query_beta=0.3),
    ),
    "normalized-before": (
        "exaone4",
        {
            "head_dim": 16,
            "sliding_window": None,
            "rope_parameters": PLAIN,
            "layer_types": ["full_attention"] * 2,
        },
        replace(LAYER, **NORMED),
    ),
    "normalized-after": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": PLAIN},
        replace(LAYER, **NORMED, norm_after_rope=True),
    ),
}


def reference(kind: str, values: dict[str, Any], decoder: Decoder, hidden: torch.Tensor) -> Any:
    """Return what transformers' attention adds to hidden states with our weights and norm."""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = AutoConfig.for_model(kind, **COMMON | values)
    start = type(config).__name__.removesuffix("Config")
    module = getattr(modeling, f"{start}Attention")(config, layer_idx=0)
    tensors = TensorFiles(decoder.spec.source_dir)
    renamed = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
    for name, parameter in module.named_parameters():
        linear, part = name.split(".")
        key = f"model.layers.0.self_attn.{renamed.get(linear, linear)}.{part}"
        parameter.data.copy_(tensors.read(key))
    count = hidden.shape[1]
    positions = torch.arange(count)[None]
    angles = getattr(modeling, f"{start}RotaryEmbedding")(config)(hidden, positions)
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    weight = tensors.read("model.layers.0.input_layernorm.weight")
    normed = torch.nn.functional.rms_norm(hidden, (HIDDEN,), weight, decoder.spec.norm_eps)
    return module(normed, angles, mask, position_ids=positions)[0]


@pytest.mark.parametrize("name", REFERENCES)
def test_attention_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    kind, values, layer = REFERENCES[name]
    decoder = decoder_of([layer], tmp_path)
    with torch.inference_mode():
        decoder.forward(torch.arange(40)[None])  # what is kept then must serve gradients, too
    mine, theirs = (torch.randn(1, 40, HIDDEN).requires_grad_() for _ in range(2))
    theirs.data.copy_(mine.data)

    result = decoder.sublayers[0](mine)

    expected = theirs + reference(kind, values, decoder, theirs)
    terms = terms_of(decoder.spec, 40)  # more than attention's
    torch.testing.assert_close(result, expected, **near(expected, terms))
    direction = torch.randn_like(result)
    gradients = [
        torch.autograd.grad((x * direction).sum(), of)[0]
        for x, of in ((result, mine), (expected, theirs))
    ]
    torch.testing.assert_close(*gradients, **near(gradients[1], 2 * terms))  # there and back


MIXED = [
    replace(LAYER, rule=AttentionRule(scale=0.25, window=10)),
    replace(with_rope(LAYER, rotary_dim=0), num_kv_heads=4),
    with_rope(
        replace(LAYER, num_heads=2, num_kv_heads=1, head_dim=32, **NORMED),
        rotary_dim=24,
        interleaved=True,
        kind=RopeKind.YARN,
        factor=4.0,
        original_max_positions=16,
        query_beta=0.3,
    ),
    replace(LAYER, **NORMED, norm_after_rope=True),
]


@pytest.fixture
def mixed(tmp_path: Path) -> Decoder:
    """A model of four kinds of layers; the first and the last share a rope."""
    return decoder_of(MIXED, tmp_path)


@pytest.mark.parametrize("parts", [(48,), (1,) * 48, (5, 1, 1, 20, 1, 3, 17), (40, 8)])
def test_parts_and_steps_equal_a_whole_pass(parts: tuple[int, ...], mixed: Decoder) -> None:
    ids = torch.randint(mixed.spec.vocab_size, (2, 48))
    sequences = Sequences(mixed.spec, batch=2, tokens=48)
    expected = mixed.forward(ids)

    found = [
        sequences.read(lambda x, view, table: mixed.forward(x, view, table), part)
        for part in ids.split(list(parts), dim=1)
    ]

    bound = near(expected, terms_of(mixed.spec, 48))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **bound)


def test_layers_with_equal_ropes_share_a_table(mixed: Decoder) -> None:
    tables = Sequences(mixed.spec, tokens=20).angles

    assert len(tables.tables) == 3
    assert [tables.of_layer.index(i) for i in tables.of_layer] == [0, 1, 2, 0]
    assert tables.layer(0) is tables.layer(3)
    assert [tables.layer(i).cos.shape[1] for i in range(4)] == [8, 0, 12, 8]
    rows = tables.at(torch.tensor([[3, 4], [17, 18]]))
    assert rows.positions.tolist() == [[3, 4], [17, 18]]
    assert torch.equal(rows.layer(2).sin[1, 0, 0], tables.layer(2).sin[17])
    scale = rows.layer(2).query_scale
    assert scale is not None
    assert scale.flatten().tolist() == pytest.approx([1.0] * 2 + [1 + 0.3 * math.log(2)] * 2)


def test_every_layer_of_a_cache_has_its_own_shape(tmp_path: Path) -> None:
    wide = replace(LAYER, num_kv_heads=4, head_dim=32)
    spec = spec_of([LAYER, wide], tmp_path)

    stores = Sequences(spec, tokens=300, name="fp16").cache.stores

    shapes = [(x.keys.data.shape[0], x.kv_heads, x.head_dim, x.nbytes) for x in stores]
    tokens = 3 * PAGE_TOKENS  # with the spare page
    assert shapes == [(tokens, 2, 16, 4 * tokens * 64), (tokens, 4, 32, 4 * tokens * 128)]
    assert cache_bytes(spec, context=tokens, cache_format="fp16") == 4 * tokens * (64 + 128)


def test_forecasts_count_the_keys_of_each_layer(tmp_path: Path) -> None:
    grouped = spec_of([LAYER, LAYER], tmp_path)
    single = spec_of([LAYER, replace(LAYER, num_kv_heads=4)], tmp_path)

    few, many = (Composition.of(spec, CalibrationOptions()) for spec in (grouped, single))
    texts = Texts(context=256, pages=1, cache_format="fp16")
    work = [DeviceNeed.of_layer(x, 1, texts).attending for x in (grouped, single)]

    elements = many.elements - few.elements
    assert many.at_once == few.at_once
    assert elements == 2 * 32 * many.span * many.at_once + 2 * 32 * HIDDEN
    assert work[1] - work[0] == 2 * 2 * 32 * PAGE_TOKENS


def test_overrides_change_the_layers_that_rotate(tmp_path: Path) -> None:
    spec = spec_of(MIXED, tmp_path)

    changed = spec.with_rope(scale=2.0, yarn=3.0)

    ropes = [layer.rope for layer in changed.attentions]
    assert ropes[1] == spec.attentions[1].rope
    assert [rope.position_scale for rope in ropes] == [2.0, 1.0, 2.0, 2.0]
    assert [rope.kind for rope in ropes] == ["yarn", "default", "yarn", "yarn"]
    assert (ropes[2].interleaved, ropes[2].query_beta) == (True, 0.3)
    assert changed.max_positions == 3 * 16
