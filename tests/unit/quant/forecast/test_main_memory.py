"""Main memory beside a GPU: what moves, in blocks as torch pins them, not what is computed."""

from dataclasses import replace
from pathlib import Path

import pytest
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.memory import pinned_block
from exl2flow.model import resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.main_memory import beside_gpu
from exl2flow.quant.forecast.needs import stage_needs
from exl2flow.quant.walk.needs import Card

ROOMY = Card(name="A card", memory=80 * 10**9)
WIDE = {"vocab_size": 4096, "hidden_size": 64}


def memory_of(config: ConversionConfig, card: Card = ROOMY) -> dict[str, int]:
    spec = resolve(config.source)
    needs = stage_needs(config, STAGES, spec, card, packed=10**6)
    return {n: need.memory_bytes for n, need in beside_gpu(config, spec, card, needs).items()}


@pytest.fixture
def config(tmp_path: Path) -> ConversionConfig:
    return small_config(make_tiny("llama", tmp_path / "model"), tmp_path / "out")


@pytest.mark.parametrize(("count", "block"), [(1, 1), (5, 8), (64, 64), (65, 128)])
def test_blocks_are_powers_of_two(count: int, block: int) -> None:
    assert pinned_block(count) == block


def test_a_stage_has_the_blocks_of_those_before_it(config: ConversionConfig) -> None:
    needs = memory_of(config)

    walks = [needs[name] for name in ("sensitivity", "measure", "quantize")]
    assert walks == sorted(walks)


def test_work_on_a_gpu_takes_less_main_memory_than_on_a_cpu(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model", vocab_size=40_000)
    config = small_config(source, tmp_path / "out")
    on_cpu = stage_needs(config, STAGES, resolve(source), None, packed=10**6)

    needs = memory_of(config)

    assert needs["measure"] < on_cpu["measure"].memory_bytes


def test_layers_add_nothing(tmp_path: Path) -> None:
    few, many = (
        memory_of(
            small_config(make_tiny("llama", tmp_path / f"{n}", num_hidden_layers=n), tmp_path / "o")
        )
        for n in (4, 8)
    )

    for name in ("sensitivity", "measure", "quantize"):
        assert few[name] == many[name]


def test_states_without_room_on_the_gpu_are_counted(config: ConversionConfig) -> None:
    spec = resolve(config.source)
    needs = stage_needs(config, STAGES, spec, ROOMY, packed=10**6)
    away = {name: replace(need, pinned_bytes=need.gpu_memory_bytes) for name, need in needs.items()}

    there, here = (beside_gpu(config, spec, ROOMY, each) for each in (needs, away))

    assert here["sensitivity"].memory_bytes > there["sensitivity"].memory_bytes
