"""Scores against a direct computation in fp64, shared passes, and refusals."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bounds import SIGMAS, error, terms_of
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.core.errors import ConfigError, SourceModelError
from exl2flow.core.reports import Score
from exl2flow.core.store.files import read_json, write_json
from exl2flow.engine.loading.load import load_model
from exl2flow.engine.loading.streamed import StreamedModel
from exl2flow.inference.scoring import evaluate as evaluate_module
from exl2flow.inference.scoring.evaluate import RowKey, RowScores, evaluate, evaluate_texts
from exl2flow.model import Sublayer

ROWS, TOKENS, SUBLAYERS = 3, 40, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one vocabulary and different weights."""
    root = tmp_path_factory.mktemp("models")
    return [make_tiny("llama", root / f"seed-{seed}", seed=seed) for seed in range(3)]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (ROWS, TOKENS))


def log_probabilities(model: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return fp64 (rows, t - 1, v) for all predicted positions."""
    decoder = load_model(model, device="cpu").decoder
    with torch.inference_mode():
        return torch.log_softmax(decoder.forward(ids)[:, :-1].double(), dim=-1)


def relative(models: list[Path]) -> float:
    """Return the error of sums of losses and divergences, which are larger than logits, of 1."""
    return SIGMAS * error(terms_of(load_model(models[0], device="cpu").spec, TOKENS))


def assert_same(found: Score, expected: Score) -> None:
    """Compare scores computed from fp32 logits of chunks of different sizes."""
    values = asdict(found)
    for name, value in asdict(expected).items():
        if name == "rows":
            for key, sums in value.items():
                assert values[name][key] == (sums and pytest.approx(sums, rel=1e-5, abs=1e-6)), key
        else:
            near = isinstance(value, float)
            assert values[name] == (pytest.approx(value, rel=1e-5, abs=1e-7) if near else value)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that gains a model's folder whenever all its sublayers are read."""
    read, passes = StreamedModel._read, list[Path]()

    def counted(model: StreamedModel) -> Iterator[Sublayer]:
        passes.append(model.folder)
        return read(model)

    monkeypatch.setattr(StreamedModel, "_read", counted)
    return passes


def test_model_does_not_diverge_from_itself(models: list[Path], ids: torch.Tensor) -> None:
    (score,) = evaluate([models[0]], ids, reference=models[0])

    assert (score.kl_divergence, score.kl_median, score.kl_p99) == (0.0, 0.0, 0.0)
    assert score.top1_agreement == 1.0
    assert score.perplexity == score.reference_perplexity


def test_perplexity_is_that_of_a_direct_computation(models: list[Path], ids: torch.Tensor) -> None:
    (score,) = evaluate([models[0]], ids, reference=models[1])

    for model, found in ((models[0], score.perplexity), (models[1], score.reference_perplexity)):
        chosen = log_probabilities(model, ids).gather(2, ids[:, 1:, None])
        assert found == pytest.approx(float((-chosen.mean()).exp()), rel=relative(models))


def test_divergence_and_agreement_are_those_of_a_direct_computation(
    models: list[Path], ids: torch.Tensor
) -> None:
    (score,) = evaluate([models[0]], ids, reference=models[1])

    found, expected = (log_probabilities(model, ids) for model in models[:2])
    kl = (expected.exp() * (expected - found)).sum(dim=-1).flatten().numpy()
    agree = (expected.argmax(dim=-1) == found.argmax(dim=-1)).double().mean()
    assert score.kl_divergence == pytest.approx(kl.mean(), rel=relative(models))
    assert score.kl_median == pytest.approx(np.median(kl), rel=relative(models))
    assert score.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=relative(models))
    assert score.top1_agreement == pytest.approx(float(agree))


def test_tokens_and_bytes_are_counted(models: list[Path], ids: torch.Tensor) -> None:
    (score,) = evaluate([models[0]], ids)

    assert score.tokens == ROWS * (TOKENS - 1)
    assert score.bytes == (models[0] / "model.safetensors").stat().st_size
    assert score.model == str(models[0])


def test_without_a_reference_there_is_no_divergence(models: list[Path], ids: torch.Tensor) -> None:
    (alone,) = evaluate([models[0]], ids)
    (compared,) = evaluate([models[0]], ids, reference=models[1])

    fields = ("reference_perplexity", "kl_divergence", "kl_median", "kl_p99", "top1_agreement")
    assert compared.rows is not None
    rows = replace(compared.rows, divergences=None, agreements=None)
    assert_same(alone, replace(compared, **dict.fromkeys(fields), rows=rows))


def test_several_models_share_one_pass_of_the_reference(
    models: list[Path], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate = [evaluate([model], ids, reference=models[2])[0] for model in models[:2]]
    passes = counted_reads(monkeypatch)

    together = evaluate(models[:2], ids, reference=models[2])

    assert sorted(passes) == models
    for found, expected in zip(together, separate, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["LOGIT_BYTES", "STATE_BYTES"])
def test_scores_do_not_depend_on_the_size_of_the_pieces(
    name: str, models: list[Path], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evaluate(models[:2], ids, reference=models[2])
    steps: list[tuple[int, int]] = []
    if name == "STATE_BYTES":
        monkeypatch.setattr(evaluate_module, name, 1)
        monkeypatch.setattr(evaluate_module, "LEAST_ROWS", 1)
    else:
        monkeypatch.setitem(evaluate_module.LOGIT_BYTES, "cpu", 4 * VOCAB_SIZE * 3)

    found = evaluate(
        models[:2],
        ids,
        reference=models[2],
        advance=lambda done, total, detail: steps.append((done, total)),
    )

    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    passes = 3 * SUBLAYERS * (ROWS if name == "STATE_BYTES" else 1)
    assert {total for _, total in steps} == {passes}
    assert sorted({done for done, _ in steps}) == list(range(passes + 1))
    assert steps[-1] == (passes, passes)


def test_other_vocabulary_is_refused(models: list[Path], ids: torch.Tensor, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path, vocab_size=VOCAB_SIZE + 1)

    with pytest.raises(ConfigError, match=f"has {VOCAB_SIZE + 1} tokens"):
        evaluate([other], ids, reference=models[0])


def test_scores_keep_the_order_of_the_models(models: list[Path], ids: torch.Tensor) -> None:
    scores = evaluate([models[1], models[0], models[1]], ids)

    assert [score.model for score in scores] == [str(models[i]) for i in (1, 0, 1)]
    assert_same(scores[0], scores[2])


def test_texts_of_different_lengths_share_one_pass(
    models: list[Path], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [ids, torch.randint(VOCAB_SIZE, (2, 24))]
    separate = [evaluate([models[0]], text, reference=models[1])[0] for text in texts]
    passes = counted_reads(monkeypatch)

    [together] = evaluate_texts([models[0]], texts, reference=models[1])

    assert passes == models[:2]
    for found, expected in zip(together, separate, strict=True):
        assert_same(found, expected)


def test_rows_that_are_scored_are_not_scored_again(
    models: list[Path], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = evaluate([models[0]], ids, reference=models[1])
    monkeypatch.setattr(evaluate_module, "STATE_BYTES", 1)
    monkeypatch.setattr(evaluate_module, "LEAST_ROWS", 1)
    scored, passes = dict[RowKey, RowScores](), 2 * SUBLAYERS

    def stop(done: int, total: int, detail: str) -> None:
        if done == passes + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_texts([models[0]], [ids], reference=models[1], advance=stop, save=scored.update)
    assert list(scored) == [(0, 0)]
    totals: set[int] = set()
    [[found]] = evaluate_texts(
        [models[0]],
        [ids],
        reference=models[1],
        advance=lambda done, total, detail: totals.add(total),
        known=scored,
    )

    assert totals == {(ROWS - 1) * passes}
    assert_same(found, expected)


def test_tokens_of_another_model_are_refused(models: list[Path], ids: torch.Tensor) -> None:
    ids[1, 7] = VOCAB_SIZE

    with pytest.raises(
        SourceModelError, match=r"1 of 120 tokens .* such as id 301 of 301; the tok"
    ):
        evaluate([models[0]], ids)


def test_rows_add_up_to_the_figures(models: list[Path], ids: torch.Tensor) -> None:
    (found,) = evaluate([models[0]], ids, reference=models[1])

    rows = found.rows
    assert rows is not None
    assert rows.tokens == (ids.shape[1] - 1,) * ROWS
    assert math.exp(sum(rows.losses) / found.tokens) == pytest.approx(found.perplexity)
    assert sum(rows.divergences or ()) / found.tokens == pytest.approx(found.kl_divergence)
    assert sum(rows.agreements or ()) / found.tokens == found.top1_agreement
    assert found.intervals is None  # too few rows


def test_scores_with_enough_rows_have_intervals_and_survive_a_file(
    models: list[Path], tmp_path: Path
) -> None:
    ids = torch.randint(VOCAB_SIZE, (8, 12))

    (found,) = evaluate([models[0]], ids, reference=models[1])

    assert found.intervals is not None
    low, high = found.intervals.kl_divergence or (0, 0)
    assert low < (found.kl_divergence or 0) < high
    write_json(tmp_path / "score.json", asdict(found))
    assert Score.of(found.model, read_json(tmp_path / "score.json")) == found


def test_scores_name_the_text_they_belong_to(models: list[Path], ids: torch.Tensor) -> None:
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % VOCAB_SIZE
    texts = [evaluate([models[0]], rows)[0].text for rows in (ids, other, ids)]

    assert texts[0] == texts[2]
    assert texts[0] != texts[1]


KNOWN = Score(
    model="m",
    perplexity=9.5,
    reference_perplexity=9.0,
    kl_divergence=0.25,
    kl_median=0.125,
    kl_p99=2.0,
    top1_agreement=0.75,
    tokens=64,
    bytes=1000,
)


def test_a_score_of_a_newer_version_is_read_without_its_new_fields() -> None:
    assert Score.of("m", {**asdict(KNOWN), "kl_p999": 4.0}) == KNOWN


def test_fields_missing_in_a_score_of_an_older_version_are_none() -> None:
    values = {key: value for key, value in asdict(KNOWN).items() if key not in ("kl_p99", "model")}

    assert Score.of("m", values) == replace(KNOWN, kl_p99=None)


@pytest.mark.parametrize("name", ["perplexity", "tokens", "bytes"])
@pytest.mark.parametrize("value", [None, "7", [], 10**400])
def test_a_score_without_perplexity_or_sizes_is_none(name: str, value: object) -> None:
    assert Score.of("m", {**asdict(KNOWN), name: value}) is None
