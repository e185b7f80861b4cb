"""The demo model is a real one: it speaks, and fewer bits hurt it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config

from exl2flow.core.options.config import CalibrationOptions
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.core.store.files import read_json
from exl2flow.inference import Generator, Request, SamplingSettings, load_model
from exl2flow.model import Tokenizer, expected_tensors, resolve
from exl2flow.pipeline.local import run_locally

DEMO = Path(__file__).parents[2] / "demo" / "model"
HELD_OUT = DEMO.parent / "heldout.txt"
CALIBRATION = CalibrationOptions(rows=8, row_tokens=512, measure_rows=8, measure_row_tokens=512)
FOUR_BITS = 4_416_884  # bytes of the weights at 4 bits with a head of 6


@dataclass(frozen=True)
class Converted:
    """What validation found at one target, what bits were allotted, and the bytes of weights."""

    perplexity: float
    reference_perplexity: float
    kl_divergence: float
    allocation: dict[str, Any]
    bytes: int


def converted(folder: Path, **target: object) -> Converted:
    """Convert the demo model; conversions share what does not depend on the target."""
    config = small_config(
        DEMO,
        folder / "-".join(target),
        work_root=folder / "work",
        calibration=CALIBRATION,
        rounding={"rounds": 0},  # to save time
        validate_options=ValidateOptions(text=HELD_OUT, rows=8, row_tokens=512, sample_tokens=0),
        **target,
    )
    conversion = run_locally(config)
    score = read_json(conversion.stages["validate"] / "report.json")["score"]
    return Converted(
        perplexity=score["perplexity"],
        reference_perplexity=score["reference_perplexity"],
        kl_divergence=score["kl_divergence"],
        allocation=read_json(conversion.stages["allocate"] / "allocation.json"),
        bytes=sum(path.stat().st_size for path in conversion.out.glob("*.safetensors")),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def poor(folder: Path) -> Converted:
    """The model at two and a half bits per weight of the decoder."""
    return converted(folder, bpw=2.5)


@pytest.fixture(scope="module")
def good(folder: Path) -> Converted:
    """The model in the bytes that four bits per weight take."""
    return converted(folder, target_bytes=FOUR_BITS)


def test_the_demo_model_is_small_and_whole() -> None:
    spec = resolve(DEMO)

    parameters = sum(
        1 if not shape else shape[0] * (shape[1] if len(shape) > 1 else 1)
        for shape in expected_tensors(spec).values()
    )

    assert 2_000_000 <= parameters <= 4_000_000
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 8_000_000
    assert Tokenizer.load(DEMO).vocab_size == spec.vocab_size


@pytest.mark.slow
def test_perplexity_on_held_out_text_rises_by_five_percent_at_two_and_a_half_bits(
    poor: Converted,
) -> None:
    assert poor.perplexity >= 1.05 * poor.reference_perplexity


@pytest.mark.slow
def test_perplexity_rises_as_bits_fall(poor: Converted, good: Converted) -> None:
    assert poor.perplexity > good.perplexity > good.reference_perplexity
    assert good.reference_perplexity < 3


@pytest.mark.slow
def test_divergence_at_two_and_a_half_bits_is_five_times_that_at_four(
    poor: Converted, good: Converted
) -> None:
    assert poor.kl_divergence >= 5 * good.kl_divergence > 0


@pytest.mark.slow
def test_a_total_is_kept_to_within_a_thousandth_and_the_head_is_chosen(good: Converted) -> None:
    assert 0.999 * FOUR_BITS <= good.bytes <= FOUR_BITS
    assert "lm_head" in good.allocation["choice"]


@pytest.mark.slow
def test_bits_per_weight_are_kept_to_within_a_thousandth(poor: Converted) -> None:
    assert 0.999 * 2.5 <= poor.allocation["bpw"] <= 2.5
    assert "lm_head" not in poor.allocation["choice"]
    assert poor.bytes < FOUR_BITS


def test_greedy_text_is_language_and_does_not_loop() -> None:
    model = load_model(DEMO, device="cpu")

    request = Request(
        "One morning", max_new_tokens=200, settings=SamplingSettings.greedy(), stops=()
    )
    events = list(Generator(model).stream(request))

    made = [token for event in events for token in event.ids]
    text = "".join(event.text for event in events)
    trigrams = list(zip(made, made[1:], made[2:], strict=False))
    assert len(made) == 200
    assert len(set(trigrams)) >= 0.6 * len(trigrams)
    assert sum(_words(text)) >= 0.9 * len(_words(text))


def _words(text: str) -> list[bool]:
    """Return for each word of a text whether the model's own corpus or prose knows it."""
    folder = DEMO.parents[1]
    sources = [*(folder / "demo").glob("*.txt"), *(folder / "calibration_data/text").rglob("*.txt")]
    known = set(_split(" ".join(path.read_text(encoding="utf-8") for path in sources)))
    return [word in known for word in _split(text)]


def _split(text: str) -> list[str]:
    return "".join(c.lower() if c.isalpha() else " " for c in text).split()
