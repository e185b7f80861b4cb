"""Published configs give the published numbers of parameters, and the layers of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from published import PUBLISHED, Published, row_of

from exl2flow.model import ModelSpec, expected_tensors, resolve
from exl2flow.model.config.delta_spec import DeltaSpec
from exl2flow.model.config.families import FAMILIES

NOT_PUBLISHED = {  # rows without a published model whose config and count are known here
    ("ArceeForCausalLM", None),
    ("Exaone4_5_ForConditionalGeneration", "exaone4"),
    ("GraniteMoeSWAForCausalLM", None),
    ("GraniteMoeSharedForCausalLM", None),
    ("GraniteSWAForCausalLM", None),
    ("Ministral3ForCausalLM", None),
    ("SolarOpenForCausalLM", None),  # its card says 102.6B of 102,651,799,552
}
WITHOUT_CLASS = (  # in transformers
    "Yi-34B",
    "internlm2_5-7b",
    "internlm2_5-20b",
    "Orion-14B",
    "MiniCPM-2B",
    "Index-1.9B",
    "IQuest-Coder-V1-40B",
)
UNITS = {"GiB": 2**30 / 2, "B": 1e9, "M": 1e6}  # GiB of 16-bit numbers


def resolved(model: Published, folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(model.config))
    return resolve(folder)


def parameters(model: Published, spec: ModelSpec) -> int:
    """Return the number that our shapes give; a tied head counts once."""
    apart = {f"{key}.weight" for key in (spec.embedding_key, spec.head.key)}
    shapes = expected_tensors(spec).items()
    return sum(math.prod(s) for name, s in shapes if model.has_embedding or name not in apart)


def rounded(count: int, published: str) -> str:
    """Return a count in the unit and with the decimals of a published one."""
    unit = next(unit for unit in UNITS if published.endswith(unit))
    decimals = len(published.removesuffix(unit).partition(".")[2])
    return f"{count / UNITS[unit]:.{decimals}f}{unit}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_published_count(name: str, tmp_path: Path) -> None:
    model = PUBLISHED[name]

    count = parameters(model, resolved(model, tmp_path)) + model.tower

    if isinstance(model.count, str):
        assert rounded(count, model.count) == model.count
    else:
        assert count == model.count


def transformers_config(model: Published) -> Any:
    """Return the text model's config as its class completes it; None: transformers has no class."""
    kind: Any = getattr(transformers, model.config["architectures"][0], None)
    if kind is None:
        return None
    values = {key: value for key, value in model.config.items() if value != {}}
    del values["architectures"]
    return kind.config_class(**values).get_text_config()


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_have_the_windows_and_thetas_of_transformers(name: str, tmp_path: Path) -> None:
    layers = resolved(PUBLISHED[name], tmp_path).attentions
    config = transformers_config(PUBLISHED[name])
    if config is None:
        assert name in WITHOUT_CLASS
        return
    window = getattr(config, "sliding_window", None)
    default = "sliding_attention" if window else "full_attention"
    types = getattr(config, "layer_types", None) or [default] * len(layers)
    chunk = getattr(config, "attention_chunk_size", None)
    windows, chunks = {"sliding_attention": window}, {"chunked_attention": chunk}
    ropes = getattr(config, "rope_parameters", {})
    if hasattr(config, "attn_config"):  # whose base transformers 5 does not use
        ropes = {"rope_theta": config.attn_config.rope_theta}
    for layer, kind in zip(layers, types, strict=True):
        if isinstance(layer, DeltaSpec):
            assert kind == "linear_attention"
            continue
        assert (layer.rule.window, layer.rule.chunk) == (windows.get(kind), chunks.get(kind))
        if dims := layer.rope.rotary_dim:
            rope = ropes.get(kind, ropes)
            stretch = rope.get("alpha", 1.0) ** (dims / (dims - 2))
            assert layer.rope.theta == pytest.approx(rope["rope_theta"] * stretch)


def test_every_family_has_a_published_model() -> None:
    assert {*FAMILIES} == {row_of(name) for name in PUBLISHED} | NOT_PUBLISHED
    assert len(PUBLISHED) >= 40
