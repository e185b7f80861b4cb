"""The demo model is a real one: it speaks, and fewer bits hurt it."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from conversions import small_config

from exl2flow.core.config import CalibrationOptions, ValidateOptions
from exl2flow.flows.local import run_locally
from exl2flow.inference import BaseGenerator, SamplingSettings, load_model
from exl2flow.model import Tokenizer, expected_tensors, resolve

DEMO = Path(__file__).parents[2] / "demo" / "model"
CALIBRATION = CalibrationOptions(rows=8, row_tokens=512, measure_rows=8, measure_row_tokens=512)


@dataclass(frozen=True)
class Scores:
    """What validation found at one bitrate."""

    perplexity: float
    reference_perplexity: float
    kl_divergence: float


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Scores]:
    folder = tmp_path_factory.mktemp("demo")
    found = {}
    for bpw in (2.5, 4.0):
        config = small_config(
            DEMO,
            folder / f"{bpw}bpw",
            bpw=bpw,
            calibration=CALIBRATION,
            validate_options=ValidateOptions(rows=8, row_tokens=512, sample_tokens=0),
        )
        conversion = run_locally(config)
        score = json.loads((conversion.stages["validate"] / "report.json").read_bytes())["score"]
        found[bpw] = Scores(*(score[name] for name in Scores.__annotations__))
    return found


def test_the_demo_model_is_small_and_whole() -> None:
    spec = resolve(DEMO)

    parameters = sum(
        1 if not shape else shape[0] * (shape[1] if len(shape) > 1 else 1)
        for shape in expected_tensors(spec).values()
    )

    assert 2_000_000 <= parameters <= 4_000_000
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 8_000_000
    assert Tokenizer.load(DEMO).vocab_size == spec.vocab_size


def test_perplexity_on_held_out_text_rises_by_five_percent_at_two_and_a_half_bits(
    scores: dict[float, Scores],
) -> None:
    assert scores[2.5].perplexity >= 1.05 * scores[2.5].reference_perplexity


def test_divergence_at_two_and_a_half_bits_is_five_times_that_at_four(
    scores: dict[float, Scores],
) -> None:
    assert scores[2.5].kl_divergence >= 5 * scores[4.0].kl_divergence > 0


def test_greedy_text_is_language_and_does_not_loop() -> None:
    model = load_model(DEMO, device="cpu")

    made = BaseGenerator(model).generate(
        "One morning", max_new_tokens=200, settings=SamplingSettings.greedy(), stop_tokens=()
    )

    trigrams = list(zip(made.ids, made.ids[1:], made.ids[2:], strict=False))
    assert len(made.ids) == 200
    assert len(set(trigrams)) >= 0.6 * len(trigrams)
    assert sum(_words(made.text)) >= 0.9 * len(_words(made.text))


def _words(text: str) -> list[bool]:
    """Return for each word of a text whether the model's own corpus or prose knows it."""
    folder = DEMO.parents[1]
    sources = [*(folder / "demo").glob("*.txt"), *(folder / "calibration_data/text").rglob("*.txt")]
    known = set(_split(" ".join(path.read_text(encoding="utf-8") for path in sources)))
    return [word in known for word in _split(text)]


def _split(text: str) -> list[str]:
    return "".join(c.lower() if c.isalpha() else " " for c in text).split()
