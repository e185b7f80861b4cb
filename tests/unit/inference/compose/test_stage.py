"""Rows that the source model writes itself."""

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

from exl2flow.core.errors import InferenceError, Interrupted, NonFiniteState
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Tick, silent
from exl2flow.core.store.files import read_json, read_tensors
from exl2flow.core.store.stage import Pipeline
from exl2flow.engine.loading.layer_split import Split
from exl2flow.engine.loading.load import LoadedModel, load_model
from exl2flow.inference.compose import stage as compose
from exl2flow.inference.compose.stage import COMPOSE, distinct_share
from exl2flow.inference.compose.writer import Look, TextWriter, draw_tokens
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import Placement
from exl2flow.model.memory import composition
from exl2flow.quant.tokenize.openings import Openings

BOS, EOS = 0, 1
ALONE = [[BOS]]


def written(
    model: LoadedModel, texts: range, tokens: int = 48, openings: list[list[int]] = ALONE
) -> torch.Tensor:
    writer = TextWriter(model, texts=len(texts), span=tokens)
    return writer.write([openings] * len(texts), [f"0/{text}" for text in texts], lambda at: None)


def with_head(source: Path, folder: Path, change: Callable[[torch.Tensor], None]) -> LoadedModel:
    copied = shutil.copytree(source, folder / "model")
    tensors = load_file(copied / "model.safetensors")
    change(tensors["lm_head.weight"])
    save_file(tensors, copied / "model.safetensors")
    return load_model(copied, device="cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("compose") / "model")


@pytest.fixture(scope="module")
def model(source: Path) -> LoadedModel:
    return load_model(source, device="cpu")


def test_texts_written_together_are_those_written_alone(model: LoadedModel) -> None:
    together = written(model, range(5))

    alone = [written(model, range(text, text + 1))[0] for text in range(5)]

    assert torch.equal(together, torch.stack(alone))
    assert len(together.unique(dim=0)) == 5
    assert together[:, 0].tolist() == [BOS] * 5
    assert int(together.max()) < model.tokenizer.vocab_size
    assert together.dtype == torch.int64


def test_a_writer_forgets_the_texts_before(model: LoadedModel) -> None:
    writer = TextWriter(model, texts=2, span=16)
    first, again = (writer.write([ALONE] * 2, ["a", "b"], lambda at: None) for _ in range(2))

    assert torch.equal(first, again)
    assert torch.equal(writer.write([ALONE], ["b"], lambda at: None), first[1:])


def test_a_model_on_several_devices_writes_the_same_texts(source: Path, model: LoadedModel) -> None:
    first, second = (torch.device("cpu", index) for index in range(2))
    apart = Placement(embedding=first, layers=(first, second), head=second)

    with devices() as fakes:
        split = load_model(source, device="cpu", placement=apart)
        found = written(split, range(3), tokens=12)

    assert torch.equal(found, written(model, range(3), tokens=12))
    assert (first, second, (3, 64)) in fakes.moves


def test_a_text_follows_the_models_own_distribution(model: LoadedModel) -> None:
    """Behind its opening, each token equals its draw from a pass over the whole text at once."""
    opening, tokens = [BOS, 7, 9], 24
    ids = written(model, range(1, 2), tokens, [opening])
    source = random.Random("0/1")
    draws = torch.tensor([source.random() for _ in range(tokens)], dtype=torch.float64)

    with torch.inference_mode():
        logits = model.decoder.forward(ids)[0, :, : model.tokenizer.vocab_size]

    expected = draw_tokens(logits, draws).tolist()
    end = [*ids[0, :-1].tolist(), EOS].index(EOS)
    assert ids[0, : len(opening)].tolist() == opening
    assert ids[0, len(opening) : end + 1].tolist() == expected[len(opening) - 1 : end]


def test_after_the_end_of_a_text_comes_its_next_opening(source: Path, tmp_path: Path) -> None:
    model = with_head(source, tmp_path, lambda head: head.zero_())  # all tokens are equally likely

    # an end token within an opening, as templates have them, ends nothing
    ids = written(model, range(32), 256, [[BOS, EOS, 9], [BOS, 7]]).tolist()

    after = [row[at + 1 : at + 3] for row in ids for at in range(254) if row[at] == EOS]
    assert {tuple(turn) for turn in after if turn[0] == BOS} == {(BOS, EOS), (BOS, 7)}
    assert all(turn[0] == 9 for turn in after if turn[0] != BOS)
    assert all(row[:3] == [BOS, EOS, 9] for row in ids)


def test_tokens_are_drawn_in_proportion() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000

    drawn = draw_tokens(logits.expand(1000, 4), draws).bincount()

    assert drawn.tolist() == [100, 200, 300, 400]


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_impossible_tokens_are_never_drawn(draw: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])

    token = draw_tokens(logits, torch.tensor([draw], dtype=torch.float64))

    assert token.item() in (1, 2)


def test_logits_that_are_not_finite_are_refused(source: Path, tmp_path: Path) -> None:
    model = with_head(source, tmp_path, lambda head: head[5].fill_(torch.nan))

    with pytest.raises(InferenceError, match=r"not finite.*`--calibration standard`"):
        written(model, range(2), tokens=8)


def test_the_stage_names_a_weight_that_is_not_finite(source: Path, tmp_path: Path) -> None:
    with_head(source, tmp_path, lambda head: head[5].fill_(torch.inf))
    pipeline = Pipeline(config_in(tmp_path / "model", tmp_path), (COMPOSE,), device="cpu")

    with pytest.raises(NonFiniteState, match=r"`lm_head.weight` of .* holds NaN or infinity in"):
        pipeline.run("compose", progress=silent)


def test_repetition_lowers_the_share_of_distinct_runs() -> None:
    assert distinct_share(torch.arange(32)) == 1.0
    assert distinct_share(torch.zeros(32, dtype=torch.int64)) == 1 / 25


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
    """A pipeline that will write five rows of two texts of 32 tokens, four at a time."""
    monkeypatch.setattr(composition, "TEXT_TOKENS", 32)
    monkeypatch.setattr(composition, "TEXTS_AT_ONCE", 4)
    return Pipeline(config_in(source, tmp_path), (COMPOSE,), device="cpu")


def results(pipeline: Pipeline) -> dict[str, str]:
    files = contents(pipeline.path("compose"))
    return {name: digest for name, digest in files.items() if name != "manifest.json"}


def test_the_stage_belongs_to_self_only(source: Path, tmp_path: Path) -> None:
    enabled = {
        text: COMPOSE.enabled(config_in(source, tmp_path, text)) for text in ("self", "chat")
    }

    assert enabled == {"self": True, "chat": False}


def test_rows_are_texts_one_after_the_other(
    pipeline: Pipeline, source: Path, model: LoadedModel
) -> None:
    pipeline.run("compose", progress=silent)

    folder = pipeline.path("compose")
    ids = read_tensors(folder / "rows.safetensors")["composed"]
    described = read_json(folder / "rows.json")
    openings = Openings(source, model.tokenizer, seed=0)
    texts = [written(model, range(text, text + 1), 32, openings.of(text)) for text in range(10)]
    assert torch.equal(ids, torch.cat(texts).view(5, 64))
    assert described["kinds"] == ["self"] * 5
    assert described["notes"][0].startswith(
        "self: 5 rows of 64 tokens written by the model, as texts of 32 (alone, continued); "
    )


@pytest.mark.parametrize("stubborn", [False, True])
def test_loops_are_written_anew_unless_there_is_nothing_else(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    asked: list[list[str]] = []

    def write(self: TextWriter, openings: object, seeds: list[str], look: object) -> torch.Tensor:
        asked.append(seeds)
        numbers = torch.tensor([int(seed.split("/")[1]) for seed in seeds])
        loops = (numbers % 2 == 1) & ((numbers < 4) | torch.tensor(stubborn))
        return 3 + (torch.arange(32) + numbers[:, None]) * ~loops[:, None]

    monkeypatch.setattr(TextWriter, "write", write)
    pipeline.run("compose", progress=silent)

    folder = pipeline.path("compose")
    first = read_tensors(folder / "rows.safetensors")["composed"].view(10, 32)[:, 0]
    if stubborn:
        assert list(map(len, asked)) == [4, 4, 4, 4]  # 16 are more than one and a half times 10
        assert int((first == 3).sum()) == 3  # text 0 is none of the loops
        assert "8 of 16 texts repeated themselves" in read_json(folder / "rows.json")["notes"][0]
    else:
        assert list(map(len, asked)) == [4, 4, 4]
        assert first.tolist() == [3, 5, 7, 8, 9, 10, 11, 12, 13, 14]


def test_a_split_has_room_for_the_rows_of_a_batch(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def load(
        folder: Path, *, placement: Split, max_tokens: int, device: str, embedding: str
    ) -> LoadedModel:
        given.append((placement, max_tokens))
        return load_model(folder, device=device, embedding=embedding)

    monkeypatch.setattr(composition, "TEXTS_AT_ONCE", 2)
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
        if tick.done == (4 if wanted == "after" else 0):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=f"after {4 if wanted == 'after' else 0} of 10"):
        stop_after_first.run("compose", progress=sink)
    stop_after_first.run("compose", progress=silent)
    pipeline.run("compose", progress=silent)

    assert results(stop_after_first) == results(pipeline)


def test_a_resumed_run_writes_as_many_texts_at_once(
    pipeline: Pipeline, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.run("compose", progress=silent)
    stopped = Pipeline(config_in(source, tmp_path / "b"), (COMPOSE,), device="cpu")

    def sink(tick: Tick) -> None:
        if tick.done == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        stopped.run("compose", progress=sink)
    monkeypatch.setattr(composition, "TEXTS_AT_ONCE", 3)  # as if there were less memory now
    stopped.run("compose", progress=silent)

    assert results(stopped) == results(pipeline)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("texts-00004.safetensors", truncate), ("rows.safetensors", truncate), ("rows.json", delete)],
)
def test_a_spoiled_file_alone_is_made_again(
    pipeline: Pipeline, damage: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.run("compose", progress=silent)
    before = results(pipeline)
    damage(pipeline.path("compose") / name)
    asked: list[list[str]] = []
    write = TextWriter.write

    def recording(self: TextWriter, openings: list, seeds: list[str], look: Look) -> torch.Tensor:
        asked.append(seeds)
        return write(self, openings, seeds, look)

    monkeypatch.setattr(TextWriter, "write", recording)

    pipeline.run("compose", progress=silent)

    assert results(pipeline) == before
    assert asked == ([["0/4", "0/5", "0/6", "0/7"]] if name.startswith("texts-") else [])
