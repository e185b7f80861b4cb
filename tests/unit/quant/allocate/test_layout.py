"""What the output will hold, known before anything is written."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from measurements import decoder_projections
from tiny import make_tiny

from exl2flow.core.store.files import write_layout
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.files.exl2 import QuantParams, padded_columns, tensor_names
from exl2flow.quant.allocate.layout import (
    FORMAT_METADATA,
    output_bytes,
    output_layout,
    plain_tensors,
    plan_shards,
)
from exl2flow.quant.measure.candidates import HEAD_PARAMS, PROJECTION_OPTIONS

MIB = 2**20


def varied_choice(spec: ModelSpec) -> dict[str, QuantParams]:
    """Return other parameters for every projection, as far as there are."""
    everything = [*decoder_projections(spec), spec.head]
    options = itertools.cycle(PROJECTION_OPTIONS)
    return {p.key: params for p, params in zip(everything, options, strict=False)}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(kibibytes=st.lists(st.integers(0, 3000), min_size=1, max_size=12), limit=st.integers(-1, 4))
@example(kibibytes=[512, 512, 1024, 1, 1023, 1023, 1], limit=1)  # all fit exactly
def test_shards_keep_order_and_limit(kibibytes: list[int], limit: int) -> None:
    layout = {f"t{i}": (torch.float16, (512, k)) for i, k in enumerate(kibibytes)}

    shards = plan_shards(layout, limit)

    assert [name for shard in shards for name in shard.layout] == list(layout)
    if limit <= 0:
        assert len(shards) == 1
    sizes = [[1024 * k for _, (_, k) in shard.layout.values()] for shard in shards]
    for index, found in enumerate(sizes):
        assert limit <= 0 or sum(found) <= limit * MIB or len(found) == 1
        assert index == 0 or sum(sizes[index - 1]) + found[0] > limit * MIB
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert [shard.name for shard in shards] == (["model.safetensors"] if count == 1 else names)


def test_plain_tensors_are_all_that_no_projection_owns(tmp_path: Path) -> None:
    spec = resolve(make_tiny("qwen3", tmp_path, num_hidden_layers=1))

    assert plain_tensors(spec) == {
        "model.embed_tokens.weight": (301, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_norm.weight": (32,),
        "model.layers.0.self_attn.k_norm.weight": (32,),
        "model.layers.0.post_attention_layernorm.weight": (64,),
        "model.norm.weight": (64,),
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_matrix_has_the_parameters_chosen_for_it_alone(
    family: str, tied: bool, tmp_path: Path
) -> None:
    spec = resolve(make_tiny(family, tmp_path, head_dim=24, tie_word_embeddings=tied))
    choice = varied_choice(spec)

    layout = output_layout(spec, choice)

    for p in [*decoder_projections(spec), spec.head]:
        own = {name: entry for name, entry in layout.items() if name.startswith(f"{p.key}.")}
        assert own.keys() - {f"{p.key}.bias"} == set(tensor_names(p.key))
        columns = padded_columns(p.out_features)
        bits = choice[p.key].total_bits(p.in_features, columns, has_bias=p.has_bias)
        assert 8 * sum(dtype.itemsize * count(shape) for dtype, shape in own.values()) == bits
    assert (f"{decoder_projections(spec)[0].key}.bias" in layout) == (family == "qwen2")
    assert "model.embed_tokens.weight" in layout
    assert "lm_head.weight" not in layout


def count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def test_plain_tensors_stand_first_and_the_head_last(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path))

    names = list(output_layout(spec, varied_choice(spec)))

    plain = list(plain_tensors(spec))
    assert names[: len(plain)] == plain
    assert [name.rpartition(".")[0] for name in names[-len(tensor_names("x")) :]] == ["lm_head"] * 5


@pytest.mark.parametrize("shard_size_mb", [0, 1])
def test_bytes_are_those_of_the_files(shard_size_mb: int, tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path / "model", vocab_size=9000))
    choice = varied_choice(spec) | {spec.head.key: HEAD_PARAMS[6]}
    shards = plan_shards(output_layout(spec, choice), shard_size_mb)

    for shard in shards:
        tensors = (torch.zeros(shape, dtype=dtype) for dtype, shape in shard.layout.values())
        write_layout(tmp_path / shard.name, shard.layout, tensors, metadata=FORMAT_METADATA)

    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert (len(sizes) > 1) == (shard_size_mb == 1)
    assert sizes == {shard.name: shard.bytes for shard in shards}
    assert output_bytes(spec, choice, shard_size_mb) == sum(sizes.values())
