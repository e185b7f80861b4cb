import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bounds import near, terms_of
from caches import Sequences
from decoders import build_decoder
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import MissingTensor, TensorShapeError
from exl2flow.model import Decoder, Embedding, TensorFiles, build_head, check_layers, resolve
from exl2flow.model.files.headers import unclaimed


def build(folder: Path) -> Decoder:
    return build_decoder(resolve(folder), TensorFiles(folder), dtype=torch.float32, device="cpu")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (`__` for `.`) of the single file, or take out those that are None."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = {**load_file(path), **named}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, shape)


def test_logits_are_fp32_over_the_vocabulary(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path))
    files = TensorFiles(tmp_path)

    logits = build_decoder(spec, files, dtype=torch.bfloat16, device="cpu").forward(ids(2, 5))

    assert logits.dtype == torch.float32
    assert logits.shape == (2, 5, VOCAB_SIZE)


def test_phases_of_the_decoder_compose_to_forward(tmp_path: Path) -> None:
    decoder, tokens = build(make_tiny("qwen2", tmp_path)), ids(1, 5)
    hidden = decoder.embed(tokens)
    for sublayer in decoder.sublayers:
        hidden = sublayer(hidden)

    assert torch.equal(hidden, decoder.hidden(tokens))
    assert torch.equal(decoder.head(hidden), decoder.forward(tokens))


def test_ids_without_a_row_count_as_zero() -> None:
    embedding = Embedding(torch.randn(4, 8))

    result = embedding(torch.tensor([[3, 4, -1, 0]]))

    torch.testing.assert_close(result[0, 1:], embedding.weight[[0, 0, 0]], rtol=0, atol=0)
    torch.testing.assert_close(result[0, 0], embedding.weight[3], rtol=0, atol=0)


def test_tied_head_is_the_embedding_unless_there_is_another(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path, tie_word_embeddings=True))
    files, own = TensorFiles(tmp_path), torch.randn(VOCAB_SIZE, 64)

    decoder, alone = build(tmp_path), build_head(spec, files, dtype=torch.float32, device="cpu")

    assert decoder.head.linear.weight.data_ptr() == decoder.embedding.weight.data_ptr()
    assert torch.equal(alone.linear.weight, decoder.embedding.weight)
    rewrite(tmp_path, lm_head__weight=own)
    assert torch.equal(build(tmp_path).head.linear.weight, own)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_beyond_the_vocabulary_make_no_logits(tied: bool, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, tie_word_embeddings=tied)
    wide = torch.randn(VOCAB_SIZE + 19, 64)

    rewrite(
        tmp_path, model__embed_tokens__weight=wide, lm_head__weight=None if tied else wide.clone()
    )

    decoder = build(tmp_path)
    assert decoder.embedding.weight.shape[0] == VOCAB_SIZE + 19
    assert decoder.forward(ids(1, 3)).shape[-1] == VOCAB_SIZE


def test_head_with_fewer_rows_makes_fewer_logits(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)

    rewrite(tmp_path, lm_head__weight=torch.randn(VOCAB_SIZE - 1, 64))

    assert build(tmp_path).forward(ids(1, 3)).shape[-1] == VOCAB_SIZE - 1


ROWS = f"embed_tokens.* implies {VOCAB_SIZE} rows of 64"
Q_BIAS = "model__layers__0__self_attn__q_proj__bias"


@pytest.mark.parametrize(
    ("family", "name", "shape", "error", "words"),
    [
        ("llama", "lm_head__weight", None, MissingTensor, r"lm_head\.weight"),
        ("llama", "model__embed_tokens__weight", (VOCAB_SIZE, 32), TensorShapeError, ROWS),
        ("llama", "model__embed_tokens__weight", (VOCAB_SIZE - 1, 64), TensorShapeError, ROWS),
        ("qwen2", Q_BIAS, (3,), TensorShapeError, r"q_proj\.bias` has shape \(3,\)"),
    ],
)
def test_what_is_missing_or_has_another_shape_is_named(
    family: str,
    name: str,
    shape: tuple[int, ...] | None,
    error: type[Exception],
    words: str,
    tmp_path: Path,
) -> None:
    make_tiny(family, tmp_path)
    rewrite(tmp_path, **{name: None if shape is None else torch.ones(shape)})

    with pytest.raises(error, match=words):
        build(tmp_path)


def test_a_cache_goes_on_where_it_stands_back(tmp_path: Path) -> None:
    decoder, tokens = build(make_tiny("mistral", tmp_path, sliding_window=6)), ids(2, 20)
    cache = Sequences(decoder.spec, batch=2, tokens=20)
    cache.read(decoder.forward, tokens.flip(1))

    cache.length = 0
    cache.read(decoder.forward, tokens[:, :12])
    cache.length = 8
    logits = cache.read(decoder.forward, tokens[:, 8:])

    expected = decoder.forward(tokens)[:, 8:]
    torch.testing.assert_close(logits, expected, **near(expected, terms_of(decoder.spec, 20)))


def test_vocabulary_of_the_config_decides(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 290}))

    assert build(tmp_path).forward(ids(1, 3)).shape[-1] == 290


def test_weights_of_double_precision_are_the_same_model(tmp_path: Path) -> None:
    folder, tokens = make_tiny("llama", tmp_path), ids(1, 5)
    expected = build(folder).forward(tokens)
    weights = load_file(folder / "model.safetensors")
    save_file({name: t.double() for name, t in weights.items()}, folder / "model.safetensors")

    assert torch.equal(build(folder).forward(tokens), expected)


def test_more_layers_than_the_files_hold_are_refused_before_any_is_read(tmp_path: Path) -> None:
    spec = replace(resolve(make_tiny("llama", tmp_path)), num_layers=2000)

    with pytest.raises(MissingTensor, match="is 2000, the files hold 2 layers"):
        check_layers(spec, TensorFiles(tmp_path))


def test_tensors_that_nothing_reads_are_found(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path))
    assert unclaimed(spec, TensorFiles(tmp_path)) == ()
    rewrite(tmp_path, model__layers__1__mlp__experts__weight=torch.ones(1))
    rewrite(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(1))

    assert unclaimed(spec, TensorFiles(tmp_path)) == ("model.layers.1.mlp.experts.weight",)
