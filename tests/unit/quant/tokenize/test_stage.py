"""The tokenize stage: which rows it mixes, and when it runs again."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.errors import ChatTemplateError, SourceModelError
from exl2flow.core.options.config import PRESETS, ConversionConfig, SensitivityOptions, TuneOptions
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import read_json, read_tensors, write_json, write_tensors
from exl2flow.core.store.stage import KINDS_FILE, ROWS_FILE, Pipeline
from exl2flow.inference.compose.stage import COMPOSE
from exl2flow.model import Tokenizer
from exl2flow.quant.sensitivity.stage import spread_rows
from exl2flow.quant.tokenize.mix import RowRequest, calibration_rows, row_counts
from exl2flow.quant.tokenize.stage import (
    FURTHER,
    TOKENIZE,
    load_rows,
    split_rows,
    training_rows,
    unjudged_rows,
)

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
BOS = 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def config_of(source: Path, **calibration: object) -> ConversionConfig:
    rows = {"rows": 7, "row_tokens": 64, "measure_rows": 2, "measure_row_tokens": 32}
    return small_config(source, source.parent / "out", calibration=rows | calibration)


def pipeline_of(source: Path, **calibration: object) -> Pipeline:
    return Pipeline(config_of(source, **calibration), (COMPOSE, TOKENIZE), device="cpu")


def tokenized(source: Path, **calibration: object) -> Pipeline:
    pipeline = pipeline_of(source, **calibration)
    for name in pipeline.stages:
        pipeline.run(name, progress=silent)
    return pipeline


def kinds_of(pipeline: Pipeline, mix: str) -> list[str]:
    kinds: list[str] = read_json(pipeline.path("tokenize") / "rows.json")[mix]["kinds"]
    return kinds


def with_template(source: Path, text: str = TEMPLATE) -> None:
    (source / "chat_template.jinja").write_text(text)


def standard_rows(source: Path, rows: int) -> torch.Tensor:
    request = RowRequest(rows=rows, row_tokens=64, vocab_size=301)
    return calibration_rows(None, Tokenizer.load(source), request).ids


def test_standard_rows_need_no_other_stage(source: Path) -> None:
    pipeline = tokenized(source)

    assert list(pipeline.stages) == ["tokenize"]
    rows = load_rows(pipeline.path("tokenize"), "quantize")
    assert torch.equal(rows, standard_rows(source, 7))


def test_half_of_the_rows_are_dialogues(source: Path) -> None:
    with_template(source)

    pipeline = tokenized(source, text="chat")

    assert Counter(kinds_of(pipeline, "quantize"))["chat"] == 4
    assert kinds_of(pipeline, "measure")[0] == "chat"
    rows = load_rows(pipeline.path("tokenize"), "quantize")
    assert (rows[:4, 0] == BOS).all()
    assert torch.equal(rows[4:], standard_rows(source, 3))


def test_half_of_the_rows_are_the_models_own(source: Path) -> None:
    pipeline = tokenized(source, text="self")

    composed = read_tensors(pipeline.path("compose") / "rows.safetensors")["composed"]
    assert kinds_of(pipeline, "quantize")[:4] == ["self"] * 4
    assert kinds_of(pipeline, "measure")[:1] == ["self"]
    rows = load_rows(pipeline.path("tokenize"), "quantize")
    assert torch.equal(rows[:4], composed)
    assert torch.equal(rows[4:], standard_rows(source, 3))
    measured = load_rows(pipeline.path("tokenize"), "measure")
    assert torch.equal(measured[0], composed[0, :32])
    notes = read_json(pipeline.path("tokenize") / "manifest.json")["notes"]
    assert any(note.startswith("quantize rows: self: 4 rows of 64 tokens") for note in notes)


@pytest.mark.parametrize("text", ["chat", "self"])
def test_a_share_of_one_leaves_no_standard_rows(source: Path, text: str) -> None:
    with_template(source)

    pipeline = tokenized(source, text=text, share=1.0)

    assert set(kinds_of(pipeline, "quantize")) == {text}
    assert load_rows(pipeline.path("tokenize"), "quantize").shape == (7, 64)


def test_a_tokenizer_of_another_model_is_refused(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))

    with pytest.raises(SourceModelError, match="tokenizer belongs to another model"):
        tokenized(source)


def test_a_model_without_template_is_refused(source: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        pipeline_of(source, text="chat")


def test_what_matters_changes_the_fingerprint_and_nothing_else_does(source: Path) -> None:
    with_template(source)

    def fingerprint(**calibration: object) -> str:
        return pipeline_of(source, **calibration).refs["tokenize"].fingerprint

    seen = [
        fingerprint(),
        fingerprint(text="chat"),
        fingerprint(text="chat", share=0.25),
        fingerprint(text="self"),
        fingerprint(text="self", seed=1),
    ]
    assert fingerprint(share=0.25) == seen[0]
    with_template(source, TEMPLATE + " ")
    assert fingerprint() == seen[0]
    seen.append(fingerprint(text="chat"))
    assert len(set(seen)) == len(seen)


ROW = 64  # tokens


def rows_folder(folder: Path, rows: torch.Tensor, kinds: list[str]) -> Path:
    """Write a folder of the stage whose mixes both begin with the same rows, as a file's do."""
    write_tensors(folder / ROWS_FILE, {"quantize": rows, "measure": rows[: len(rows) // 2]})
    described = {"quantize": kinds, "measure": kinds[: len(rows) // 2]}
    content = {mix: {"kinds": found, "notes": []} for mix, found in described.items()}
    write_json(folder / KINDS_FILE, content)
    return folder


def tokens(rows: torch.Tensor) -> set[int]:
    return {*rows.flatten().tolist()}


@pytest.mark.parametrize("held_out", [1, 4, 7])
@pytest.mark.parametrize("quality", ["fast", "standard", "best"])
def test_no_row_that_judges_is_used_for_factors_hessians_or_costs(
    tmp_path: Path, quality: str, held_out: int
) -> None:
    counts = row_counts(RowRequest(rows=115, row_tokens=ROW))
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    folder = rows_folder(tmp_path, torch.arange(115 * ROW).view(115, ROW), kinds)
    count = PRESETS[quality].get("sensitivity", {}).get("rows", SensitivityOptions().rows)

    _, judges = split_rows(folder, held_out)
    used = [
        spread_rows(folder, int(str(count)), held_out),
        unjudged_rows(folder, "quantize", held_out),
        unjudged_rows(folder, "measure", held_out),
    ]

    assert [len(rows) for rows in used[:2]] == [count, 115 - held_out]
    assert all(tokens(rows).isdisjoint(tokens(judges)) for rows in used)


@pytest.mark.parametrize(("count", "is_longer"), [(60, False), (900, True)])
def test_a_user_s_further_text_is_only_trained_on(
    source: Path, count: int, is_longer: bool
) -> None:
    words = [f"{number:05d}" for number in range(count)]
    text = source.parent / "mine.parquet"
    pq.write_table(pa.table({"text": [" ".join(words)]}), text)
    config = config_of(source, text=text)
    config = config.model_copy(update={"tune": TuneOptions(steps=1)})
    pipeline = Pipeline(config, (TOKENIZE,), device="cpu")

    pipeline.run("tokenize", progress=silent)

    folder = pipeline.path("tokenize")
    ids = Tokenizer.load(source).encode(" ".join(words))
    rows = training_rows(folder, 2)
    used = split_rows(folder, 2)[0]
    assert torch.equal(rows[: len(used)], used)
    assert len(rows) - len(used) == max(0, len(ids) // 64 - 7)
    assert (FURTHER in read_tensors(folder / ROWS_FILE)) == is_longer
    for place, row in enumerate(rows[len(used) :], 7):
        assert row.tolist() == ids[64 * place : 64 * (place + 1)]
    untrained = tokenized(source, text=text)
    assert FURTHER not in read_tensors(untrained.path("tokenize") / ROWS_FILE)


def test_rows_that_share_text_with_a_judge_are_used_for_nothing(tmp_path: Path) -> None:
    text = torch.arange(400)
    starts = [round(i * (400 - ROW) / 15) for i in range(16)]
    rows = torch.stack([text[start : start + ROW] for start in starts])
    folder = rows_folder(tmp_path, rows, ["text"] * 15 + ["random"])

    training, judges = split_rows(folder, 4)
    used = unjudged_rows(folder, "quantize", 4)

    assert torch.equal(used[:-1], training)
    assert torch.equal(used[-1], rows[-1])  # random tokens are no text
    assert torch.equal(spread_rows(folder, 99), training)
    shared = [len(tokens(row[None]) & tokens(judge[None])) for row in training for judge in judges]
    assert max(shared) < 32 + 32


def test_rows_that_all_share_text_are_used_unless_they_judge(tmp_path: Path) -> None:
    text = torch.arange(ROW + 6)
    rows = torch.stack([text[i : i + ROW] for i in (0, 1, 2, 2, 3, 4)])
    folder = rows_folder(tmp_path, rows, ["text"] * 5 + ["random"])

    _, judges = split_rows(folder, 1)
    used = unjudged_rows(folder, "quantize", 1)

    assert judges[:, 0].tolist() == [2]
    assert used[:, 0].tolist() == [0, 1, 3, 4]


def test_single_row_of_text_is_used_by_all(tmp_path: Path) -> None:
    rows = torch.arange(2 * ROW).view(2, ROW)
    folder = rows_folder(tmp_path, rows, ["text", "random"])

    assert torch.equal(unjudged_rows(folder, "quantize", 4), rows)
    assert torch.equal(spread_rows(folder, 4), rows[:1])
