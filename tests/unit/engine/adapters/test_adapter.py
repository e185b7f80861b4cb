"""Adapters as they are read: what they hold, and what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import PREFIX, adapter_tensors, make_adapter, write_adapter
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.inference import Adapter, Generator, LoadedModel, Request, load_model
from exl2flow.model import resolve

Q = "model.layers.1.self_attn.q_proj"
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


def test_matrices_include_the_scaling(source: Path, model: LoadedModel, tmp_path: Path) -> None:
    plain = make_adapter(tmp_path / "plain", source, rank=4, alpha=12)
    root = make_adapter(tmp_path / "root", source, rank=4, alpha=12, use_rslora=True)
    tensors = load_file(plain / "adapter_model.safetensors")

    for folder, scale in ((plain, 3 * 0.5), (root, 6 * 0.5)):
        found = Adapter.load(folder, model, scaling=0.5)
        a, b = found.matrices[Q]
        assert torch.equal(a, tensors[A])
        torch.testing.assert_close(b, scale * tensors[B].T)
        assert found.rank == 4
        assert len(found.matrices) == 14


def test_pickled_weights_and_other_dtypes_are_read(
    source: Path, model: LoadedModel, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", source)
    expected = Adapter.load(folder, model)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)

    path.unlink()
    pickled = {name: torch.nn.Parameter(x) for name, x in tensors.items()}
    torch.save(pickled, folder / "adapter_model.bin")
    assert Adapter.load(folder, model) == expected

    for dtype in (torch.float16, torch.bfloat16):
        save_file({name: x.to(dtype) for name, x in tensors.items()}, path)
        torch.testing.assert_close(
            Adapter.load(folder, model).matrices[Q][0], tensors[A], rtol=2**-8, atol=0
        )


def test_equal_adapters_have_equal_digests(
    source: Path, model: LoadedModel, tmp_path: Path
) -> None:
    one, same, other, more, part = (
        Adapter.load(make_adapter(tmp_path / str(i), source, **options), model, scaling=scaling)
        for i, (options, scaling) in enumerate(
            [({}, 1), ({}, 1), ({"seed": 1}, 1), ({}, 2), ({"linears": ("q_proj",)}, 1)]
        )
    )

    assert one == same
    assert one.digest == same.digest
    assert len({one, same, other, more, part}) == 4


def test_unused_and_zero_tensors_are_skipped(
    source: Path, model: LoadedModel, tmp_path: Path
) -> None:
    tensors = adapter_tensors(model.spec, rank=2)
    plain = write_adapter(tmp_path / "plain", tensors, rank=2, alpha=2)
    tensors |= {
        f"{PREFIX}{Q}.lora_B.bias": torch.full((64,), 1e-7),
        f"{PREFIX}lm_head.original_module.weight": torch.ones(3, 3),
        f"{PREFIX}model.embed_tokens.modules_to_save.weight": torch.ones(3, 3),
    }
    more = write_adapter(tmp_path / "more", tensors, rank=2, alpha=2)

    assert Adapter.load(more, model) == Adapter.load(plain, model)


def test_names_are_read_from_the_layers_on(
    source: Path, model: LoadedModel, tmp_path: Path
) -> None:
    tensors = adapter_tensors(model.spec, rank=2)
    short = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    long = {"language_model." + name: x for name, x in tensors.items()}

    found = [
        Adapter.load(write_adapter(tmp_path / str(i), each, rank=2, alpha=2), model)
        for i, each in enumerate((tensors, short, long))
    ]

    assert len({*found}) == 1


@pytest.mark.parametrize("start", ["model.language_model", "language_model.model", "model"])
def test_text_model_of_a_wrapper_has_the_names_of_any_saver(start: str, tmp_path: Path) -> None:
    source = make_checkpoint("llava", tmp_path / "model")
    tensors = adapter_tensors(resolve(source), rank=2)
    named = {name.replace("language_model.model", start): x for name, x in tensors.items()}
    folder = write_adapter(tmp_path / "a", named, rank=2, alpha=2)

    found = Adapter.load(folder, load_model(source, device="cpu"))

    assert len(found.matrices) == 14
    assert "language_model.model.layers.1.self_attn.q_proj" in found.matrices


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, "`peft_type`: 'LOHA'"),
        ({"r": 0}, "`r`: 0"),
        ({"fan_in_fan_out": True}, "`fan_in_fan_out`: True"),
        ({"use_dora": True}, "`use_dora`: True"),
        ({"rank_pattern": {"q_proj": 8}}, "`rank_pattern`"),
        ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights`: 'pissa_niter_4'"),
        ({"lora_alpha": "many"}, "describes no LoRA"),
        ({"lora_alpha": math.inf}, "not finite"),
        ({"r": 8}, r"has shape \(4, 96\), `r` and the model imply \(8, 96\)"),
    ],
)
def test_options_that_are_not_supported_are_named(
    source: Path, model: LoadedModel, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    folder = make_adapter(tmp_path / "a", source)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))

    with pytest.raises(ConfigError, match=words):
        Adapter.load(folder, model)


LAYER = f"{PREFIX}model.layers"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({A: torch.ones(4, 65)}, rf"`{A}` in .* has shape \(4, 65\), .* imply \(4, 64\)"),
        ({B: torch.ones(4)}, r"has shape \(4,\), .* imply \(64, 4\)"),
        ({A: torch.ones(4, 64, dtype=torch.float64)}, "has dtype torch.float64"),
        ({A: torch.ones(4, 64, dtype=torch.int8)}, "has dtype torch.int8"),
        ({A: torch.full((4, 64), math.nan)}, f"`{Q}` in the adapter .* is not finite"),
        ({A: None}, f"lacks `lora_A` or `lora_B` of `{Q}`"),
        ({f"{LAYER}.2.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, "layers.2.mlp.* for another"),
        ({f"{LAYER}.0.mlp.fc1.lora_A.weight": torch.ones(4, 64)}, "mlp.fc1.* for another model"),
        ({f"{LAYER}.0.self_attn.q_proj.lora_C.weight": torch.ones(4, 64)}, "lora_C.* is no"),
        ({f"{LAYER}.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias.* merge it"),
        ({f"{PREFIX}lm_head.weight": torch.ones(301, 64)}, "lm_head.weight.* merge it"),
        ({f"{PREFIX}model.embed_tokens.weight": torch.ones(301, 64)}, "embed_tokens.* merge it"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    model: LoadedModel, tmp_path: Path, change: dict[str, torch.Tensor | None], words: str
) -> None:
    tensors = adapter_tensors(model.spec, rank=4) | change
    kept = {name: x for name, x in tensors.items() if x is not None}
    folder = write_adapter(tmp_path / "a", kept, rank=4, alpha=4)

    with pytest.raises(ConfigError, match=words):
        Adapter.load(folder, model)


def test_folder_that_is_missing_is_an_error_in_words(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        Adapter.load(tmp_path / "nowhere", model)

    assert str(found.value) == (
        f"`{tmp_path / 'nowhere' / 'adapter_config.json'}` does not exist; give the folder of a "
        "LoRA that PEFT saved"
    )


def test_files_that_are_missing_or_damaged_are_named(
    source: Path, model: LoadedModel, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", source)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    for content in (b"", b"{}", weights.read_bytes()[:-9]):
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
            Adapter.load(folder, model)

    weights.unlink()
    with pytest.raises(ConfigError, match=r"neither `adapter_model\.safetensors` nor"):
        Adapter.load(folder, model)
    for content in (b"", b"no pickle at all"):
        (folder / "adapter_model.bin").write_bytes(content)
        with pytest.raises(ConfigError, match=r"adapter_model\.bin"):
            Adapter.load(folder, model)
    for text in ("{", "[]", "{}"):
        config.write_text(text)
        with pytest.raises(ConfigError, match=r"adapter_config\.json"):
            Adapter.load(folder, model)
    config.unlink()
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        Adapter.load(folder, model)


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("harm"), "done"))


def test_a_pickle_runs_no_code(
    source: Path, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_adapter(tmp_path / "a", source)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"x": _Harmful()}, folder / "adapter_model.bin")

    with pytest.raises(ConfigError, match="cannot read"):
        Adapter.load(folder, model)
    assert not (tmp_path / "harm").exists()


def test_a_request_takes_adapters_of_its_model_once(
    source: Path, model: LoadedModel, tmp_path: Path
) -> None:
    adapter = Adapter.load(make_adapter(tmp_path / "a", source), model)
    other_source = make_tiny("llama", tmp_path / "other", num_hidden_layers=1)
    other = load_model(other_source, device="cpu")
    streamed = load_model(source, device="cpu", streamed=True)

    with pytest.raises(ConfigError, match="each of them once"):
        Request("a", adapters=[adapter, adapter])
    with pytest.raises(ConfigError, match="`adapters` is"):
        Request("a", adapters=["folder"])
    with pytest.raises(ConfigError, match="was not loaded for"):
        Generator(other, tokens=256, slots=1).submit(Request("a", adapters=[adapter]))
    with pytest.raises(ConfigError, match="without `streamed`"):
        Generator(streamed, tokens=256, slots=1).submit(Request("a", adapters=[adapter]))


def test_matrices_of_a_fused_linear_are_those_of_its_projections(tmp_path: Path) -> None:
    phi = load_model(make_checkpoint("phi3", tmp_path / "phi3"), device="cpu")
    name = f"{PREFIX}model.layers.1.self_attn.qkv_proj"
    projections = phi.spec.sublayers[2].projections[:3]
    rows = [p.out_features for p in projections]
    a, b = torch.randn(4, projections[0].in_features), torch.randn(sum(rows), 4)
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}

    found = Adapter.load(write_adapter(tmp_path / "a", tensors, rank=4, alpha=8), phi).matrices

    assert list(found) == [p.key for p in projections]
    for p, part in zip(projections, torch.split(b, rows), strict=True):
        assert torch.equal(found[p.key][0], a)
        assert torch.equal(found[p.key][1], 2 * part.T)
    tensors[f"{name}.lora_B.weight"] = b[1:].contiguous()
    with pytest.raises(ConfigError, match=r"qkv_proj\.lora_B.* changes what .* does not have"):
        Adapter.load(write_adapter(tmp_path / "b", tensors, rank=4, alpha=8), phi)
