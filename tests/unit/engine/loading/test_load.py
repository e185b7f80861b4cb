"""Concurrent loading: the same model, with parts and errors in order."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from exl2flow.core.errors import ConfigError, MissingTensor, SourceModelError, TensorShapeError
from exl2flow.engine.loading import load
from exl2flow.inference import load_model

IDS = torch.arange(12)[None]
WEIGHTS = "model.safetensors"
PARTS = 6  # embedding, two layers of two sublayers, head


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setitem(load.THREADS, "cpu", count)
    return count


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the stored tensors of a model."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("tied", [False, True])
def test_threads_load_the_same_model(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path / "model", tie_word_embeddings=tied)
    model = load_model(folder, device="cpu")
    monkeypatch.setitem(load.THREADS, "cpu", 1)

    alone = load_model(folder, device="cpu")

    assert torch.equal(model.decoder.forward(IDS), alone.decoder.forward(IDS))
    assert [s.spec for s in model.decoder.sublayers] == list(model.spec.sublayers)
    if tied:
        shared = model.decoder.embedding.weight.data_ptr()
        assert model.decoder.head.linear.weight.data_ptr() == shared


@pytest.mark.parametrize(("streamed", "parts"), [(False, PARTS), (True, 2)])
def test_progress_counts_the_parts_that_are_kept(
    streamed: bool, parts: int, tmp_path: Path
) -> None:
    folder, told = make_tiny("llama", tmp_path / "model"), list[tuple[int, int]]()

    load_model(
        folder,
        device="cpu",
        streamed=streamed,
        progress=lambda done, total: told.append((done, total)),
    )

    assert told == [(done, parts) for done in range(1, parts + 1)]


@pytest.mark.usefixtures("threads")
def test_the_first_error_in_the_order_of_the_model_is_raised(tmp_path: Path) -> None:
    folder, told = make_tiny("llama", tmp_path / "model"), list[int]()
    norm, down = "model.layers.0.post_attention_layernorm.weight", "model.layers.1.mlp.down_proj"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[norm] = torch.ones(5)
        del tensors[f"{down}.weight"]
        del tensors["lm_head.weight"]

    change(folder, damage)

    with pytest.raises(TensorShapeError, match=norm):
        load_model(folder, device="cpu", progress=lambda done, _: told.append(done))

    assert told == [1, 2]  # embedding, attention of layer 0


@pytest.mark.usefixtures("threads")
def test_an_error_of_the_embedding_comes_before_that_of_a_tied_head(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    change(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))

    with pytest.raises(MissingTensor, match=r"`model\.embed_tokens\.weight`"):
        load_model(folder, device="cpu")


@pytest.mark.usefixtures("threads")
def test_a_missing_head_is_named_when_all_else_is_there(tmp_path: Path) -> None:
    folder, told = make_tiny("llama", tmp_path / "model"), list[int]()
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))

    with pytest.raises(MissingTensor, match=r"`lm_head\.weight`"):
        load_model(folder, device="cpu", progress=lambda done, _: told.append(done))

    assert told == [1, 2, 3, 4, 5]


def test_a_damaged_tokenizer_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))

    with pytest.raises(SourceModelError, match=r"tokenizer\.json"):
        load_model(folder, device="cpu")


def test_positions_that_were_not_learned_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt2", tmp_path)
    assert load_model(folder, device="cpu", max_tokens=256).max_tokens == 256

    with pytest.raises(
        ConfigError, match=r"`max_tokens` is 257; .* learned positions, 256 of them"
    ):
        load_model(folder, device="cpu", max_tokens=257)

    key = "transformer.wpe.weight"
    change(folder, lambda tensors: tensors.update({key: tensors[key][:100].clone()}))
    with pytest.raises(TensorShapeError, match=r"wpe\.weight` has shape \(100, .* 256 rows"):
        load_model(folder, device="cpu")
