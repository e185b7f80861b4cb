"""Rows that the source model writes itself."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import small_config
from devices import devices
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from traces import contents, delete, truncate

from exl2flow.core.errors import InferenceError, Interrupted
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.files import read_json, read_tensors
from exl2flow.core.store.stage import Pipeline
from exl2flow.engine.loading.layer_split import Split
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.inference.compose import stage as compose
from exl2flow.inference.compose.stage import (
    COMPOSE,
    TEMPERATURES,
    distinct_share,
    draw_tokens,
    plausible_openings,
    write_rows,
)
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import Placement, Tokenizer
from exl2flow.model.memory import composition

BOS, EOS = 0, 1


def nothing(position: int) -> None:
    """Does not look at signals."""


def written(model: LoadedModel, rows: range, tokens: int = 48, seed: int = 0) -> torch.Tensor:
    return write_rows(model, rows, tokens=tokens, seed=seed, look=nothing)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("compose") / "model")


@pytest.fixture(scope="module")
def model(source: Path) -> LoadedModel:
    return load_model(source, device="cpu")


def test_rows_written_together_are_those_written_alone(model: LoadedModel) -> None:
    together = written(model, range(5))

    alone = [written(model, range(row, row + 1))[0] for row in range(5)]

    assert torch.equal(together, torch.stack(alone))
    assert len(together.unique(dim=0)) == 5


def test_a_model_on_several_devices_writes_the_same_rows(source: Path, model: LoadedModel) -> None:
    first, second = (torch.device("cpu", index) for index in range(2))
    apart = Placement(embedding=first, layers=(first, second), head=second)

    with devices() as fakes:
        split = load_model(source, device="cpu", placement=apart)
        found = written(split, range(3), tokens=12)

    assert torch.equal(found, written(model, range(3), tokens=12))
    assert (first, second, (3, 64)) in fakes.moves


def test_rows_begin_with_bos_and_stay_in_the_tokenizers_vocabulary(model: LoadedModel) -> None:
    ids = written(model, range(4))

    assert ids[:, 0].tolist() == [BOS] * 4
    assert int(ids.max()) < model.tokenizer.vocab_size
    assert ids.dtype == torch.int64


def test_the_seed_changes_what_is_written(model: LoadedModel) -> None:
    assert not torch.equal(written(model, range(2)), written(model, range(2), seed=1))


def test_a_row_follows_the_models_own_distribution(model: LoadedModel) -> None:
    """Each token equals its draw from a pass over the whole row without a cache."""
    row, tokens = 1, 24
    ids = written(model, range(row, row + 1), tokens)
    source = random.Random(f"0/{row}")
    draws = torch.tensor([source.random() for _ in range(tokens)], dtype=torch.float64)

    with torch.inference_mode():
        logits = model.decoder.forward(ids)[0, :, : model.tokenizer.vocab_size]

    expected = draw_tokens(logits, torch.full((tokens,), TEMPERATURES[row]), draws)
    follows_end = ids[0] == EOS
    assert ids[0, 1:].tolist() == torch.where(follows_end, BOS, expected)[:-1].tolist()


def test_after_the_end_of_a_text_comes_bos(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"].zero_()  # every token is equally likely, so some are EOS
    save_file(tensors, folder / "model.safetensors")

    ids = written(load_model(folder, device="cpu"), range(8), tokens=256)

    after = ids[:, 1:][ids[:, :-1] == EOS]
    assert len(after) > 2
    assert (after == BOS).all()


def test_rows_longer_than_the_positions_hold_several_texts(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model", max_position_embeddings=32)
    model = load_model(folder, device="cpu")

    ids = written(model, range(2), tokens=80)

    assert ids.shape == (2, 80)
    assert (ids[:, [0, 32, 64]] == BOS).all()
    assert torch.equal(ids[:, :32], written(model, range(2), tokens=32))


def test_a_model_without_bos_begins_with_words(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": None}))
    model = load_model(folder, device="cpu")

    ids = written(model, range(12), tokens=4)

    openings = plausible_openings(model.tokenizer)
    assert len(set(ids[:, 0].tolist())) > 1
    assert set(ids[:, 0].tolist()) <= set(openings)


def test_openings_are_capitalized_words(source: Path) -> None:
    tokenizer = Tokenizer.load(source)

    texts = [tokenizer.decode([token]) for token in plausible_openings(tokenizer)]

    assert "The" in texts
    assert all(text.isalpha() and text[0].isupper() for text in texts)


def test_tokens_are_drawn_in_proportion() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000

    plain = draw_tokens(logits.expand(1000, 4), torch.ones(1000), draws).bincount()
    cold = draw_tokens(logits.expand(1000, 4), torch.full((1000,), 0.5), draws).bincount()

    assert plain.tolist() == [100, 200, 300, 400]
    # probabilities squared: 1, 4, 9 and 16 thirtieths
    assert (cold - torch.tensor([33, 133, 300, 533])).abs().max() <= 1


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_impossible_tokens_are_never_drawn(draw: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])

    token = draw_tokens(logits, torch.ones(1), torch.tensor([draw], dtype=torch.float64))

    assert token.item() in (1, 2)


def test_logits_that_are_not_finite_are_refused(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][5, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(InferenceError, match=r"not finite.*a calibration other than `self`"):
        written(load_model(folder, device="cpu"), range(2), tokens=8)


def test_repetition_lowers_the_share_of_distinct_runs() -> None:
    assert distinct_share(torch.arange(64).view(2, 32)) == 1.0
    assert distinct_share(torch.zeros(2, 32, dtype=torch.int64)) == 1 / 50


# The stage


def config_in(source: Path, folder: Path, text: str = "self") -> ConversionConfig:
    calibration = {
        "text": text,
        "rows": 9,
        "row_tokens": 32,
        "measure_rows": 3,
        "measure_row_tokens": 64,
    }
    return small_config(source, folder / "out", work_root=folder / "work", calibration=calibration)


@pytest.fixture
def pipeline(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline that will write five rows of 64 tokens, two at a time."""
    monkeypatch.setattr(composition, "ROWS_AT_ONCE", 2)
    return Pipeline(config_in(source, tmp_path), (COMPOSE,), device="cpu")


def results(pipeline: Pipeline) -> dict[str, str]:
    files = contents(pipeline.path("compose"))
    return {name: digest for name, digest in files.items() if name != "manifest.json"}


def test_the_stage_belongs_to_self_only(source: Path, tmp_path: Path) -> None:
    enabled = {
        text: COMPOSE.enabled(config_in(source, tmp_path, text)) for text in ("self", "chat")
    }

    assert enabled == {"self": True, "chat": False}


def test_all_rows_are_stored_with_their_kinds(pipeline: Pipeline, model: LoadedModel) -> None:
    pipeline.run("compose", progress=silent)

    folder = pipeline.path("compose")
    ids = read_tensors(folder / "rows.safetensors")["composed"]
    described = read_json(folder / "rows.json")
    assert torch.equal(ids, written(model, range(5), tokens=64))
    assert described["kinds"] == [f"self T={heat}" for heat in ("0.7", "0.85", "1", "0.7", "0.85")]
    assert described["notes"][0].startswith("self: 5 rows of 64 tokens written by the model, ")


def test_a_split_has_room_for_the_rows_of_a_batch(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def load(folder: Path, *, placement: Split, max_tokens: int, device: str) -> LoadedModel:
        given.append((placement, max_tokens))
        return load_model(folder, device=device)

    monkeypatch.setattr(composition, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(compose, "load_model", load)
    config = config_in(source, tmp_path)
    for where in ({"gpu_split": "1,0,2", "devices": "2,1,0"}, {}):
        pipeline = Pipeline(config.model_copy(update=where), (COMPOSE,), device="cpu")
        shutil.rmtree(pipeline.path("compose"), ignore_errors=True)
        pipeline.run("compose", progress=silent)

    sizes = (10**9, 0, 2 * 10**9)
    split = Split(sizes=sizes, devices=(2, 1, 0), tokens=2 * PAGE_TOKENS, slots=2)
    assert given == [(split, 64), (None, None)]


@pytest.mark.parametrize("wanted", ["during", "after"])
def test_a_resumed_run_writes_the_same_bytes(
    pipeline: Pipeline, source: Path, tmp_path: Path, wanted: str
) -> None:
    stop_after_first = Pipeline(config_in(source, tmp_path / "b"), (COMPOSE,), device="cpu")

    def sink(tick: Tick) -> None:
        if tick.done == (2 if wanted == "after" else 0):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=f"after {2 if wanted == 'after' else 0} of 5"):
        stop_after_first.run("compose", progress=sink)
    stop_after_first.run("compose", progress=silent)
    pipeline.run("compose", progress=silent)

    assert results(stop_after_first) == results(pipeline)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("rows-00002.safetensors", truncate), ("rows.safetensors", truncate), ("rows.json", delete)],
)
def test_a_spoiled_file_alone_is_made_again(
    pipeline: Pipeline, damage: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.run("compose", progress=silent)
    before = results(pipeline)
    damage(pipeline.path("compose") / name)
    asked: list[range] = []
    write = compose.write_rows

    def recording(model: LoadedModel, rows: range, **options: object) -> torch.Tensor:
        asked.append(rows)
        return write(model, rows, **options)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(compose, "write_rows", recording)

    pipeline.run("compose", progress=silent)

    assert results(pipeline) == before
    assert asked == ([range(2, 4)] if name.startswith("rows-") else [])
