"""The GPU memory of every stage follows from shapes alone and respects the card's limit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import config_of
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.need import Need
from exl2flow.model import resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.needs import stage_needs
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.quant.walk.needs import Card
from exl2flow.quant.walk.working_memory import (
    FACTORING,
    MOST_TOGETHER,
    TOGETHER,
    together_bytes,
    working_bytes,
)

CARD = Card(name="A card", memory=80 * 10**9)


def needs_of(config: ConversionConfig, card: Card | None = CARD) -> dict[str, Need]:
    return stage_needs(config, STAGES, resolve(config.source), card, packed=10**6)


@pytest.mark.parametrize(
    ("quality", "expected"),
    [
        ("standard", ["sensitivity", "measure", "quantize", "compile"]),
        ("exllamav2", ["measure", "quantize", "compile"]),
        ("best", ["sensitivity", "measure", "allocate", "quantize", "tune", "compile"]),
    ],
)
def test_every_stage_that_computes_needs_memory(
    source: Path, quality: str, expected: list[str]
) -> None:
    needs = needs_of(config_of(source, quality=quality))

    assert [name for name, need in needs.items() if need.gpu_memory_bytes] == expected


def test_without_a_card_nothing_of_it_is_needed(source: Path) -> None:
    needs = needs_of(config_of(source, quality="best"), None)

    assert not any(need.gpu_memory_bytes for need in needs.values())


def test_states_leave_a_card_that_has_room_for_the_work_alone(source: Path) -> None:
    config = config_of(source, calibration={"rows": 4096, "row_tokens": 2048})
    small = replace(CARD, memory=working_bytes(resolve(source), CARD.memory) + 10**6)

    roomy, tight = needs_of(config)["quantize"], needs_of(config, small)["quantize"]

    assert tight.gpu_memory_bytes <= small.memory
    states = 4 * resolve(source).hidden_size * 4096 * 2048
    assert (roomy.pinned_bytes, tight.pinned_bytes) == (0, states)
    assert roomy.gpu_memory_bytes > states


def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    few, many = (
        needs_of(config_of(make_tiny("llama", tmp_path / str(count), num_hidden_layers=count)))
        for count in (2, 8)
    )

    for name in ("sensitivity", "measure", "quantize"):
        assert few[name].gpu_memory_bytes == many[name].gpu_memory_bytes, name


def test_experts_side_by_side_are_counted_up_to_a_bound(tmp_path: Path) -> None:
    spec = resolve(make_tiny("qwen2-moe", tmp_path / "experts"))
    routed = [p for p in spec.sublayers[1].projections if p.is_routed]
    weights, squares = sum(p.numel for p in routed), 8 * (64**2 + 32**2)

    assert together_bytes(routed, copies=3) == TOGETHER * 3 * weights + FACTORING * squares
    assert together_bytes(spec.sublayers[0].projections, copies=3) == 0

    one = routed[0]

    def sizes(copies: int, *counts: int) -> list[int]:
        return [
            together_bytes([replace(one, capture=str(i)) for i in range(count)], copies=copies)
            for count in counts
        ]

    square, half = FACTORING * one.in_features**2, MOST_TOGETHER // one.numel // 2
    none, two, *more = sizes(half, 1, 2, 3, 4)
    assert none == 0
    assert two == TOGETHER * 2 * half * one.numel + 2 * square
    assert [size - two for size in more] == [square, 2 * square]
    assert sizes(2 * half + 2, 2) == [0]  # an expert's own copies are a batch already


def test_the_plan_shows_the_card_to_people_and_programs(source: Path) -> None:
    config = config_of(source, quality="standard")
    plan = preflight(config, STAGES)
    assert plan.to_json()["card"] is None
    assert "GPU memory" not in dict(plan.rows())
    assert dict(plan.rows())["GPU fit"] == "8, 12, 16, 24, 32, 80 GB yes"
    assert json.loads(json.dumps(plan.to_json()))["gpu_fits"][0]["verdict"] == "yes"
    small = replace(CARD, memory=working_bytes(resolve(source), CARD.memory) + 1)

    roomy, tight = (
        replace(plan, card=card, cards=(card,), needs=needs_of(config, card))
        for card in (CARD, small)
    )

    assert dict(roomy.rows())["GPU memory"].endswith(" of 80.0 GB of the A card")
    assert "(states in main memory)" in dict(tight.rows())["GPU memory"]
    needs = roomy.to_json()["needs"]
    assert isinstance(needs, dict)
    assert needs["measure"]["gpu_memory_bytes"] == roomy.needs["measure"].gpu_memory_bytes
