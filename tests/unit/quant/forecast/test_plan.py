"""What the plan says about calibration, and what pre-flight refuses about it."""

import re
from pathlib import Path

import pytest
import torch
from conversions import small_config

from exl2flow.core.errors import PreflightFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.runtime import memory
from exl2flow.model import resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast import preflight as preflight_module
from exl2flow.quant.forecast.needs import stage_needs
from exl2flow.quant.forecast.plan import calibration_in_words
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.quant.walk.needs import Card

SIZES = {"rows": 115, "row_tokens": 64, "measure_rows": 19, "measure_row_tokens": 96}


def config_of(source: Path, text: str, **values: object) -> ConversionConfig:
    calibration = {**SIZES, "text": text, **values}
    return small_config(source, source.parent / "out", calibration=calibration)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("standard", ""),
        ("mine.parquet", ""),
        ("chat", "; 58 of the rows are dialogues"),
        ("self", "; the model first writes 58 of the rows itself, as 58 texts, 58 at a time"),
    ],
)
def test_the_plan_describes_the_rows(source: Path, text: str, words: str) -> None:
    said = calibration_in_words(config_of(source, text), resolve(source), None)

    assert said == f"115 rows x 64 tokens, measured on 19 x 96{words}"


@pytest.mark.parametrize(("rows", "judging"), [(115, 4), (9, 4), (4, 2), (2, 1)])
def test_the_plan_of_a_refinement_says_how_many_rows_judge(
    source: Path, rows: int, judging: int
) -> None:
    calibration = {**SIZES, "rows": rows}
    config = RefinementConfig(
        source=source,
        model=source.parent / "quantized",
        out=source.parent / "out",
        calibration=calibration,
    )

    said = calibration_in_words(config, resolve(source), None)

    assert said == f"{rows} rows x 64 tokens, of which {judging} are set aside to judge"


def test_a_missing_template_is_among_the_problems(source: Path) -> None:
    with pytest.raises(PreflightFailed, match="no chat template"):
        preflight(config_of(source, "chat"), STAGES)


def test_a_template_that_refuses_plain_turns_is_refused(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ raise_exception('tools only') }}")

    with pytest.raises(PreflightFailed, match="tools only"):
        preflight(config_of(source, "chat"), STAGES)


def test_a_template_that_works_is_no_problem(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")

    assert (
        "58 of the rows are dialogues" in preflight(config_of(source, "chat"), STAGES).calibration
    )


def composing(config: ConversionConfig, card: Card | None = None) -> tuple[int, int]:
    """Return the main memory and the GPU memory of `compose`."""
    need = stage_needs(config, STAGES, resolve(config.source), card, packed=0)["compose"]
    return need.memory_bytes, need.gpu_memory_bytes


def test_writing_needs_memory_for_the_whole_model_and_its_cache(source: Path) -> None:
    config = config_of(source, "self")

    some, _ = composing(config)
    more, _ = composing(config_of(source, "self", row_tokens=128))

    weights = (source / "model.safetensors").stat().st_size  # fp32, too
    # keys and values of 2 layers with 2 heads of 16, of 58 rows of 96 tokens
    assert some == pytest.approx(weights + 4 * 2 * 2 * 2 * 16 * 58 * 96, rel=0.02)
    assert more - some == 4 * 2 * 2 * 2 * 16 * 58 * 32
    assert composing(config, Card(name="A card", memory=10**9)) == (0, some // 2)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A GPU of 80 GB with 70 GB free, of which this process uses nothing."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    monkeypatch.setattr(memory, "_limits", {})
    monkeypatch.setattr(preflight_module, "resolve_device", lambda device: torch.device("cuda"))
    return Card.of(torch.device("cuda"), None)


def test_a_model_larger_than_the_free_memory_of_the_gpu_is_refused(
    source: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, need = composing(config_of(source, "self"), card)
    assert preflight(config_of(source, "self"), STAGES).card == card
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (need - 1, 80 * 10**9))

    preflight(config_of(source, "standard"), STAGES)
    preflight(
        config_of(source, "self").model_copy(update={"devices": "0,1"}), STAGES
    )  # loading says it
    with pytest.raises(PreflightFailed, match=r"^the stage `compose` .* `--calibration`"):
        preflight(config_of(source, "self"), STAGES)


@pytest.mark.parametrize(("free", "rooms"), [((70, 70), "70.0"), ((70, 60), "70.0, 60.0")])
@pytest.mark.usefixtures("card")
def test_the_plan_tells_the_memory_of_each_gpu(
    free: tuple[int, int], rooms: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(device: torch.device) -> tuple[int, int]:
        return free[device.index or 0] * 10**9, 80 * 10**9

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    config = config_of(source, "self").model_copy(update={"gpus": "all"})

    plan = preflight(config, STAGES)

    assert len(plan.cards) == 2
    assert plan.card == plan.cards[1] or free[0] == free[1]
    told = dict(plan.rows())
    assert told["device"] == "cuda:0, cuda:1"
    assert told["GPU memory"].endswith(f"of {rooms} GB of each A card")
    assert re.search(r"compose \S+ \(first GPU\)", told["GPU memory"])
    assert re.search(r"quantize \S+(,| of)", told["GPU memory"])


@pytest.mark.usefixtures("card")
def test_a_model_larger_than_max_memory_is_refused_however_much_is_free(source: Path) -> None:
    config = config_of(source, "self").model_copy(update={"max_memory": memory.BESIDE_TENSORS})

    with pytest.raises(PreflightFailed, match="`--calibration`"):
        preflight(config, STAGES)
