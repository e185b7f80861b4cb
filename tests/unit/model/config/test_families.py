"""Logits of every family against transformers, on checkpoints that transformers wrote."""

import ast
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import near, near_logits, terms_of
from caches import Sequences
from checkpoints import CHECKPOINTS, make_checkpoint, reference_model, rename
from decoders import build_decoder
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, make_tiny
from transformers import DynamicCache

from exl2flow.core.errors import SourceModelError, TensorShapeError, UnsupportedArchitecture
from exl2flow.model import CanonicalTensors, Decoder, resolve, with_bos
from exl2flow.model.config import families
from exl2flow.model.config.families import FAMILIES
from exl2flow.model.config.family import Family
from exl2flow.model.config.unsupported import NEEDS, need_of
from exl2flow.model.files.headers import unclaimed

MOST_LINES = 28  # of a row
LENGTHS = (24, 80)  # beyond windows, and beyond the context before it was stretched
PROMPT, STEPS = 28, 8


def our_model(folder: Path) -> Decoder:
    spec = resolve(folder)
    return build_decoder(spec, CanonicalTensors(spec), dtype=torch.float32, device="cpu")


def random_ids(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(1))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module", params=CHECKPOINTS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Decoder]:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    return reference_model(request.param, folder), our_model(folder)


@torch.no_grad()
def test_logits_agree_at_every_length(both: tuple[Any, Decoder]) -> None:
    reference, ours = both
    for length in LENGTHS:
        ids = random_ids(length)

        logits = ours.forward(ids)

        expected = reference(ids).logits
        assert expected.std() > 0.5
        bound = near_logits(expected, ours.spec, length)
        torch.testing.assert_close(logits, expected, **bound)


@torch.no_grad()
def test_cached_steps_agree(both: tuple[Any, Decoder]) -> None:
    reference, ours = both
    ids = random_ids(PROMPT + STEPS)
    past = DynamicCache(config=reference.config.get_text_config())
    cache = Sequences(ours.spec, tokens=ids.shape[1])
    for chunk in (ids[:, :PROMPT], *torch.split(ids[:, PROMPT:], 1, dim=1)):
        logits = cache.read(ours.forward, chunk)

        expected = reference(chunk, past_key_values=past, use_cache=True).logits
        bound = near_logits(expected, ours.spec, ids.shape[1])
        torch.testing.assert_close(logits, expected, **bound)


@pytest.mark.parametrize(
    ("name", "start", "head"),
    [
        ("phi3", "model.", "lm_head"),
        ("llava", "language_model.model.", "language_model.lm_head"),
        ("mistral3", "language_model.model.", "language_model.lm_head"),
        ("qwen2-vl", "model.", "lm_head"),
        ("qwen2.5-vl", "model.", "lm_head"),
    ],
)
def test_names_are_the_ones_that_exllamav2_loads(
    name: str, start: str, head: str, tmp_path: Path
) -> None:
    spec = resolve(make_checkpoint(name, tmp_path))

    first = f"{start}layers.0."
    attention, mlp = spec.sublayers[:2]
    assert (spec.embedding_key, spec.final_norm.key) == (f"{start}embed_tokens", f"{start}norm")
    assert spec.head.key == head
    assert [p.key for p in attention.projections] == [
        f"{first}self_attn.{p}_proj" for p in ("q", "k", "v", "o")
    ]
    assert [p.key for p in mlp.projections] == [
        f"{first}mlp.{p}_proj" for p in ("gate", "up", "down")
    ]
    assert [norm.key for norm in attention.norms] == [f"{first}input_layernorm"]
    assert [norm.key for norm in mlp.norms] == [f"{first}post_attention_layernorm"]


@torch.no_grad()
def test_gpt2_as_it_is_published_has_no_prefix_but_buffers(tmp_path: Path) -> None:
    make_checkpoint("gpt2", tmp_path)
    expected = reference_model("gpt2", tmp_path)(ids := random_ids(LENGTHS[0])).logits
    rename(tmp_path, lambda name: name.removeprefix("transformer."))
    buffers = {f"h.{layer}.attn.bias": torch.ones(1, 1, 256, 256) for layer in range(2)}
    save_file(buffers, tmp_path / "buffers.safetensors")

    model = our_model(tmp_path)

    bound = near(expected, terms_of(model.spec, ids.shape[1]))
    torch.testing.assert_close(model.forward(ids), expected, **bound)
    assert not unclaimed(model.spec, CanonicalTensors(model.spec))


@pytest.mark.parametrize("name", ["llava", "mistral3", "qwen2-vl", "qwen2.5-vl"])
def test_names_that_transformers_wrote_for_a_while_are_understood(
    name: str, tmp_path: Path
) -> None:
    make_checkpoint(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    heads = {"lm_head.weight", "language_model.lm_head.weight"}

    def newer(old: str) -> str:
        if old in heads:
            return "lm_head.weight"
        text = old.removeprefix("language_model.").removeprefix("model.")
        is_text = text.startswith(("layers.", "embed_tokens.", "norm."))
        return f"model.language_model.{text}" if is_text else f"model.{old}"

    rename(tmp_path, newer)

    tensors = CanonicalTensors(resolve(tmp_path))
    assert set(tensors.names) == set(stored)
    assert all(torch.equal(tensors.read(key), value) for key, value in stored.items())


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_configs_from_before_the_text_model_had_its_own(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    expected = our_model(tmp_path).forward(ids := random_ids(LENGTHS[0]))
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"], text["rope_parameters"]
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = config | text | {"rope_theta": 5000.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(flat))

    assert torch.equal(our_model(tmp_path).forward(ids), expected)


def test_parts_of_a_fused_tensor_are_read_by_themselves(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    path, key = tmp_path / "model.safetensors", "model.layers.0.mlp.gate_up_proj.weight"
    whole = load_file(path)
    fused = whole.pop(key)
    save_file(whole, path, metadata={"format": "pt"})
    apart = tmp_path / "fused.safetensors"
    save_file({key: fused}, apart)
    tensors = CanonicalTensors(resolve(tmp_path))
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    assert tensors.nbytes(gate) == tensors.nbytes(up) == fused.nbytes // 2
    assert torch.equal(tensors.read(up), fused[96:])

    os.truncate(apart, apart.stat().st_size - fused.nbytes // 2)

    assert torch.equal(tensors.read(gate), fused[:96])
    with pytest.raises(SourceModelError, match=f"ends within `{up}`"):
        tensors.read(up)


def test_fused_tensor_of_other_rows_is_refused(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    change_config(tmp_path, num_key_value_heads=4)

    with pytest.raises(TensorShapeError, match=r"layers\.0.*qkv_proj.*\(128, 64\).*192 rows"):
        CanonicalTensors(resolve(tmp_path))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llava", tmp_path)
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "more.safetensors")

    with pytest.raises(SourceModelError, match=r"`language_model\.lm_head\.weight`, which another"):
        CanonicalTensors(resolve(tmp_path))


def test_wrapper_without_its_text_config_is_refused(tmp_path: Path) -> None:
    make_checkpoint("mistral3", tmp_path)
    change_config(tmp_path, text_config=None)

    with pytest.raises(SourceModelError, match=r"`text_config` is missing.*`Mistral3For"):
        resolve(tmp_path)


def test_wrapper_of_another_text_model_is_refused(tmp_path: Path) -> None:
    make_checkpoint("mistral3", tmp_path)
    change_config(tmp_path, text_config={"model_type": "mistral4"})

    words = "`Mistral3For.*` around a text model of type `mistral4`.* it needs .*MLA"
    with pytest.raises(UnsupportedArchitecture, match=words):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "holds `linear_attention`, which needs layers with a state",
        ),
        ({"layer_types": ["full_attention", "mamba"]}, "`mamba`, which needs layers with a state"),
        (
            {"layer_types": ["chunked_attention", "full_attention"]},
            "`chunked_attention`, which needs attention within chunks",
        ),
        (
            {"layer_types": ["full_attention", "own"]},
            "holds `own`; supported are `full_attention`, `sliding_attention`",
        ),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping`.*is 30.0"),
        ({"use_qk_norm": True}, "`use_qk_norm`"),
        ({"num_local_experts": 8}, "`num_local_experts`"),
        ({"moe_num_experts": 8}, "`moe_num_experts`"),
        ({"clip_qkv": 8.0}, "`clip_qkv`.*is 8.0"),
        ({"use_bias": True}, "`use_bias`"),
        ({"use_cla": True}, "`use_cla`"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            r"`rope_parameters\.llama_4_scaling_beta`",
        ),
    ],
)
def test_values_that_change_the_graph_are_refused(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_tiny("mistral", tmp_path)
    change_config(tmp_path, **values)

    with pytest.raises(UnsupportedArchitecture, match=words):
        resolve(tmp_path)


def test_layer_types_of_another_length_are_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    change_config(tmp_path, layer_types=["full_attention"])

    with pytest.raises(SourceModelError, match=r"`layer_types`.*a list of 2 items"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("DeepseekV3ForCausalLM", "MLA"),
        ("PhimoeForCausalLM", "a mixture of experts"),
        ("Gemma4ForConditionalGeneration", "norms, blocks"),
        ("Gemma4ForCausalLM", "norms, blocks"),
        ("Gemma3nForCausalLM", "norms, blocks"),
        ("Mistral4ForCausalLM", "MLA"),
        ("DeepseekV32ForCausalLM", "MLA"),
        ("KimiLinearForCausalLM", "layers with a state"),
        ("OlmoHybridForCausalLM", "layers with a state"),
        ("Cohere2MoeForCausalLM", "a mixture of experts"),
        ("Gemma4UnifiedForConditionalGeneration", "norms, blocks"),
        ("Glm4vForConditionalGeneration", "norms, blocks"),
        ("Spark2_5ForCausalLM", "norms, blocks"),
        ("NemotronH_Omni_Reasoning_V3", "layers with a state"),
        ("BailingMoeV3ForCausalLM", "layers with a state"),
        ("Lfm3ForCausalLM", "layers with a state"),
        ("HYV4ForCausalLM", "MLA"),
        ("MiniMaxM3SparseForConditionalGeneration", "a selection of the keys"),
        ("MuseSparkForConditionalGeneration", "a mixture of experts"),
        ("MiMoV2ForCausalLM", "a mixture of experts"),
        ("LagunaForCausalLM", "a mixture of experts"),
        ("MellumForCausalLM", "a mixture of experts"),
        ("Step3p5ForCausalLM", "a mixture of experts"),
        ("Step3p7ForConditionalGeneration", "a mixture of experts"),
        ("Kolibri1ForCausalLM", "a mixture of experts"),
        ("Inkling2ForConditionalGeneration", "a mixture of experts"),
    ],
)
def test_error_for_a_known_architecture_says_what_it_needs(
    architecture: str, words: str, tmp_path: Path
) -> None:
    make_tiny("llama", tmp_path)
    change_config(tmp_path, architectures=[architecture])

    with pytest.raises(
        UnsupportedArchitecture, match=f"`{architecture}`.* it needs .*{words}"
    ) as caught:
        resolve(tmp_path)
    assert "nearest" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["KimiLinearForCausalLM"]},
        {"architectures": ["LlamoForCausalLM"]},
        {"architectures": ["Own"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "own"}},
    ],
)
def test_a_refused_architecture_names_the_pages_that_help(
    changes: dict[str, object], tmp_path: Path
) -> None:
    make_tiny("llama", tmp_path)
    change_config(tmp_path, **changes)

    with pytest.raises(UnsupportedArchitecture) as caught:
        resolve(tmp_path)

    assert "`docs/reference/models.md` lists" in str(caught.value)
    assert "`docs/concepts/families.md` explains how to add one" in str(caught.value)
    assert len(str(caught.value)) - len(str(tmp_path)) < 360  # it does not list the families


def test_each_unsupported_architecture_has_one_need_and_no_row() -> None:
    stems = [stem for of_need in NEEDS.values() for stem in of_need.split()]

    assert len({*stems}) == len(stems)
    assert [name for name, _ in FAMILIES if need_of(name)] == []
    assert [kind for _, kind in FAMILIES if kind and need_of(kind)] == []


def test_a_row_with_the_constants_that_it_names_takes_few_lines() -> None:
    lines, named = Counter[str](), dict[str, set[str]]()
    for statement in ast.parse(Path(families.__file__).read_bytes()).body:
        if isinstance(statement, ast.Assign):
            (target,) = (node for node in statement.targets if isinstance(node, ast.Name))
            assert statement.end_lineno
            lines[target.id] += statement.end_lineno - statement.lineno + 1
            names = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
            named[target.id] = named.get(target.id, set()) | names
    rows = {name for name in lines if isinstance(getattr(families, name), Family)}
    constants = {*lines} - rows

    sizes = {row: lines[row] + sum(lines[name] for name in named[row] & constants) for row in rows}

    assert {id(getattr(families, row)) for row in rows} == {*map(id, FAMILIES.values())}
    assert max(sizes.values()) <= MOST_LINES


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "gemma3-text"])
def test_hidden_states_beyond_fp16_fit_it(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for key, value in stored.items():
        if key.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            stored[key] = 20_000 * (1 + value) - 1
    save_file(stored, path, metadata={"format": "pt"})
    spec = resolve(tmp_path)
    ids = random_ids(LENGTHS[0])

    found = build_decoder(spec, CanonicalTensors(spec), dtype=torch.float16, device="cpu").forward(
        ids
    )

    wide = our_model(tmp_path)
    assert wide.hidden(ids).abs().max() / spec.family.residual_scale > 65_504
    expected = wide.forward(ids)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_texts_begin_with_bos_where_a_model_needs_it(tmp_path: Path) -> None:
    gemma = replace(resolve(make_checkpoint("gemma", tmp_path)), bos_token_id=7)
    ids = torch.tensor([[1, 2, 3], [-1, -1, -1]])

    found = with_bos(ids, gemma)

    assert found.tolist() == [[7, 2, 3], [-1, -1, -1]]
    assert ids[0, 0] == 1
    assert with_bos(ids, replace(gemma, bos_token_id=None)) is ids
    llama = replace(gemma, family=replace(gemma.family, needs_bos=False))
    assert with_bos(ids, llama) is ids
