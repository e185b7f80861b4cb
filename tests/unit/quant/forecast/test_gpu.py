"""What a conversion needs of a GPU is told from shapes alone: memory within its limit, time."""

from dataclasses import replace
from pathlib import Path

import pytest
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.config import ConversionConfig
from exl2flow.model import ModelSpec, resolve
from exl2flow.quant.forecast.gpu import Card, GpuNeed, gpu_needs
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.quant.walk.working_memory import working_bytes

CARD = Card(name="A card", flops=1e15, processors=132, memory=80 * 10**9)
OUTPUT = 10**6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def config_of(source: Path, **values: object) -> ConversionConfig:
    return small_config(source, source.parent / "out", **values)


def needs_of(
    config: ConversionConfig, card: Card = CARD, spec: ModelSpec | None = None
) -> dict[str, GpuNeed]:
    return gpu_needs(config, spec or resolve(config.source), card, output=OUTPUT)


@pytest.mark.parametrize(
    ("quality", "expected"),
    [
        ("standard", ["tokenize", "sensitivity", "measure", "allocate", "quantize", "compile"]),
        ("exllamav2", ["tokenize", "measure", "allocate", "quantize", "compile"]),
        (
            "best",
            ["tokenize", "sensitivity", "measure", "allocate", "quantize", "tune", "compile"],
        ),
    ],
)
def test_every_stage_that_runs_is_told(source: Path, quality: str, expected: list[str]) -> None:
    needs = needs_of(config_of(source, quality=quality))

    assert list(needs) == expected
    assert all(need.seconds > 0 for need in needs.values())


def test_states_leave_a_card_that_has_room_for_the_work_alone(source: Path) -> None:
    config = config_of(source, calibration={"rows": 4096, "row_tokens": 2048})
    small = replace(CARD, memory=working_bytes(resolve(source), CARD.memory) + 10**6)

    roomy, tight = needs_of(config)["quantize"], needs_of(config, small)["quantize"]

    assert roomy.states_stay
    assert not tight.states_stay
    assert tight.memory <= small.memory
    states = 4 * resolve(source).hidden_size * 4096 * 2048
    assert roomy.memory > states


@pytest.mark.parametrize("stage", ["sensitivity", "measure", "quantize"])
def test_more_layers_take_as_much_longer(tmp_path: Path, stage: str) -> None:
    folders = [
        make_tiny("llama", tmp_path / str(count), num_hidden_layers=count) for count in (2, 4, 8)
    ]

    few, more, most = (needs_of(config_of(folder))[stage].seconds for folder in folders)

    assert most - more == pytest.approx(2 * (more - few))


def test_a_slower_card_takes_longer(source: Path) -> None:
    config = config_of(source, calibration={"rows": 4096, "row_tokens": 2048})
    slow = replace(CARD, flops=CARD.flops / 10)

    assert needs_of(config, slow)["quantize"].seconds > needs_of(config)["quantize"].seconds


def test_more_rounds_take_longer(source: Path) -> None:
    one, four = (
        needs_of(config_of(source, rounding={"rounds": rounds}))["quantize"].seconds
        for rounds in (1, 4)
    )
    assert four > one


def test_the_plan_tells_it_to_people_and_programs(source: Path) -> None:
    plan = preflight(config_of(source, quality="standard"))
    assert "card" in plan.to_json()
    assert not [what for what, _ in plan.rows() if what.startswith("GPU")]

    needs = needs_of(config_of(source, quality="standard"))
    on_card = replace(plan, card=CARD, gpu_needs=needs)

    rows = dict(on_card.rows())
    assert "80.0 GB of the A card" in rows["GPU memory"]
    assert "quantize 2" in rows["GPU time"]
    told = on_card.to_json()["gpu_needs"]
    assert isinstance(told, dict)
    assert set(told) == set(needs)
    assert told["measure"]["gpu_memory_bytes"] == needs["measure"].memory
