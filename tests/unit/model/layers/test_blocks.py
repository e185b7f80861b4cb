"""Blocks that are not Llama's, against plain formulas."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blocks import ROWS, add_rows, make_block
from bounds import near, terms_of
from decoders import build_decoder
from torch import Tensor
from torch.nn import functional

from exl2flow.model import (
    Decoder,
    ModelSpec,
    Sublayer,
    SublayerSpec,
    TensorFiles,
    expected_tensors,
    resolve,
)
from exl2flow.model.layers.low_rank import with_low_rank
from exl2flow.model.layers.rope import rope_table

IDS = torch.arange(18).view(2, 9) * 5


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rows(monkeypatch)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Decoder]:
    def build(name: str) -> Decoder:
        spec = resolve(make_block(name, tmp_path))
        return build_decoder(spec, TensorFiles(tmp_path), dtype=torch.float32, device="cpu")

    return build


def check(spec: ModelSpec, found: Tensor, expected: Tensor, *more: int) -> None:
    """Compare what up to a whole model computes of nine positions."""
    torch.testing.assert_close(found, expected, **near(expected, terms_of(spec, 9), *more))


def stored(spec: ModelSpec, key: str) -> Tensor:
    return TensorFiles(spec.source_dir).read_floating(key)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(spec: ModelSpec, sublayer: SublayerSpec, role: str, x: Tensor) -> Tensor:
    key = next(p.key for p in sublayer.projections if p.role == role)
    return x @ stored(spec, f"{key}.weight").T


def attention(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally with outputs of projections (b, t, h · d)."""
    of, count = spec.attentions[0], q.shape[1]
    table = rope_table(of.rope, 0, count, q.device)
    q, k, v = (x.view(*x.shape[:2], -1, of.head_dim).transpose(1, 2) for x in (q, k, v))
    q, k = table.rotate(q), table.rotate(k)
    k, v = (x.repeat_interleave(of.num_heads // of.num_kv_heads, dim=1) for x in (k, v))
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * of.rule.scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_parallel_block_is_one_sublayer_of_two_parts(load: Callable[[str], Decoder]) -> None:
    spec = load("parallel").spec

    assert [s.name for s in spec.sublayers] == ["model.layers.0", "model.layers.1"]
    assert [s.index for s in spec.sublayers] == [0, 1]
    block = spec.sublayers[1]
    assert [part.name for part in block.parts] == ["model.layers.1.self_attn", "model.layers.1.mlp"]
    assert [norm.key for norm in block.norms] == ["model.layers.1.input_layernorm"]
    assert [(p.role, p.capture) for p in block.projections] == [
        *((role, "input") for role in "qkv"),
        ("o", "self_attn.inner"),
        *((role, "input") for role in ("gate", "up")),
        ("down", "mlp.inner"),
    ]
    assert block.projection("down").key == "model.layers.1.mlp.down_proj"
    assert block.projection("down").reads == "model.layers.1.mlp.inner"
    assert "model.layers.1.post_attention_layernorm.weight" not in expected_tensors(spec)


def test_attention_and_mlp_of_a_parallel_block_read_one_normed_state(
    load: Callable[[str], Decoder],
) -> None:
    decoder = load("parallel")
    spec, block = decoder.spec, decoder.sublayers[1]
    hidden = torch.randn(2, 9, 64)

    reads = block.reads(hidden)

    x = rms(hidden, stored(spec, "model.layers.1.input_layernorm.weight"), spec.norm_eps)
    q, k, v, gate, up = (linear(spec, block.spec, r, x) for r in ("q", "k", "v", "gate", "up"))
    inner, product = attention(spec, q, k, v), functional.silu(gate) * up
    expected = {"input": x, "self_attn.inner": inner, "mlp.inner": product}
    assert list(reads) == list(expected)
    for capture, found in reads.items():
        check(spec, found, expected[capture])
    o, down = linear(spec, block.spec, "o", inner), linear(spec, block.spec, "down", product)
    check(spec, block.output(hidden, reads), hidden + 0.5 * (o + down))
    assert torch.equal(block(hidden), block.output(hidden, reads))


def test_an_mlp_without_a_gate_activates_its_only_product(load: Callable[[str], Decoder]) -> None:
    decoder = load("plain")
    spec, mlp = decoder.spec, decoder.sublayers[3]
    hidden = torch.randn(2, 9, 64)

    found = mlp(hidden)

    assert list(mlp.linears) == ["c_fc", "c_proj"]
    x = rms(hidden, stored(spec, "model.layers.1.post_attention_layernorm.weight"), spec.norm_eps)
    inner = functional.gelu(linear(spec, mlp.spec, "up", x))
    check(spec, found, hidden + linear(spec, mlp.spec, "down", inner))


def test_a_block_may_norm_its_outputs_only_and_whole_queries_and_keys(
    load: Callable[[str], Decoder],
) -> None:
    decoder = load("after")
    spec, hidden = decoder.spec, torch.randn(2, 9, 64)
    first, last = decoder.sublayers[2:]

    def centered(x: Tensor, key: str, *, has_bias: bool = True) -> Tensor:
        weight = stored(spec, f"{key}.weight") + 1
        bias = stored(spec, f"{key}.bias") if has_bias else None
        return functional.layer_norm(x, x.shape[-1:], weight, bias, spec.norm_eps)

    q, k, v = (linear(spec, first.spec, role, hidden) for role in "qkv")
    q = centered(q, "model.layers.1.self_attn.q_norm", has_bias=False)
    k = centered(k, "model.layers.1.self_attn.k_norm", has_bias=False)
    put = linear(spec, first.spec, "o", attention(spec, q, k, v))
    expected = hidden + centered(put, "model.layers.1.post_attention_norm")
    check(spec, first(hidden), expected)
    gate, up = (linear(spec, last.spec, role, hidden) for role in ("gate", "up"))
    put = linear(spec, last.spec, "down", functional.silu(gate) * up)
    expected = hidden + centered(put, "model.layers.1.post_mlp_norm")
    check(spec, last(hidden), expected)


def test_residual_scale_and_logit_softcap_match_the_formula(load: Callable[[str], Decoder]) -> None:
    decoder = load("capped")
    spec, hidden = decoder.spec, stored(decoder.spec, "model.embed_tokens.weight")[IDS]

    def normed(x: Tensor, key: str) -> Tensor:
        return rms(x, stored(spec, f"{key}.weight"), spec.norm_eps)

    for layer in range(2):
        name, (first, last) = f"model.layers.{layer}", spec.sublayers[2 * layer : 2 * layer + 2]
        x = normed(hidden, f"{name}.input_layernorm")
        q, k, v = (linear(spec, first, role, x) for role in "qkv")
        put = linear(spec, first, "o", attention(spec, q, k, v))
        hidden = hidden + normed(put, f"{name}.post_attention_norm")
        x = normed(hidden, f"{name}.post_attention_layernorm")
        put = functional.silu(linear(spec, last, "gate", x)) * linear(spec, last, "up", x)
        hidden = hidden + normed(linear(spec, last, "down", put), f"{name}.post_mlp_norm")
    logits = normed(hidden, "model.norm") @ stored(spec, "lm_head.weight").T * 2
    expected = 3 * torch.tanh(logits / 3)
    check(spec, decoder.forward(IDS), expected)
    assert expected.abs().max() < 3 < logits.abs().max()


@pytest.mark.parametrize("name", ROWS)
def test_low_rank_products_are_those_of_merged_weights(
    name: str, load: Callable[[str], Decoder]
) -> None:
    decoder, generator = load(name), torch.Generator().manual_seed(0)
    twin, parts = with_low_rank(decoder)
    plain = decoder.forward(IDS)
    for part in parts:
        part.down, part.ups = part.room(8, decoder.embedding.weight.dtype)
        part.unused = torch.zeros(2, 1, 1, 8, dtype=torch.bool)

    def change(sublayer: Sublayer) -> None:
        for p in sublayer.spec.projections:
            a = torch.randn(8, p.in_features, generator=generator) * p.in_features**-0.5
            b = torch.randn(8, p.out_features, generator=generator) * 0.3
            (own,) = (part for part in parts if p.key in part.keys)
            own.put({**matrices, p.key: (a, b)}, 0, 8)
            matrices[p.key] = a, b

    matrices: dict[str, tuple[Tensor, Tensor]] = {}
    for sublayer in decoder.sublayers:
        change(sublayer)
    found = twin.forward(IDS)
    for sublayer in decoder.sublayers:
        for p in sublayer.spec.projections:
            a, b = matrices[p.key]
            sublayer.linears[p.name].weight.add_(b.T @ a)
    expected = decoder.forward(IDS)

    assert not torch.allclose(found, plain, atol=0.1)
    added = sum(p.in_features + 8 for s in decoder.spec.sublayers for p in s.projections)
    check(decoder.spec, found, expected, added)
