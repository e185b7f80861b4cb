"""Launch plans of layers of experts fit on the cards that people own."""

import numpy as np
import pytest
import torch
from cards import CARDS
from expert_banks import bank, some_of
from expert_layers import LAYERS

from exl2flow.kernels import RouterRule
from exl2flow.kernels.plans.experts import EXPERT, _fit, plan_of
from exl2flow.kernels.plans.shares import STEP

WIDTHS = {"qwen3-30b-a3b": 2048, "gpt-oss": 2880, "mixtral-8x7b": 4096}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_a_plan_on_every_card(name: str, card: str) -> None:
    rule, options = LAYERS[name]
    processors, shared = CARDS[card].limits

    plan = plan_of(bank(rule, **options), (processors, shared))

    assert plan is not None
    assert plan.shared <= shared
    assert plan.ctas in (processors, 2 * processors)
    assert plan.argument["slots"] == rule.top + (options.get("shared", 0) > 0)


def test_some_experts_have_a_table_of_their_own() -> None:
    rule, options = LAYERS["qwen2"]
    part = some_of(bank(rule, **options), range(1, rule.experts, 2))

    plan = plan_of(part, (132, 227 << 10))

    assert plan is not None
    assert part.places is not None
    assert plan.argument["places"] == part.places.data_ptr()
    assert plan.argument["experts"] == rule.experts  # that are scored
    assert plan.argument["held"] == len(part.experts) == rule.experts // 2


@pytest.mark.parametrize("model", WIDTHS)
def test_widths_of_models_for_small_cards_fit_into_99_kb(model: str) -> None:
    assert _fit(16 * WIDTHS[model], STEP + 128 + 8, 99 << 10) is not None


def test_an_expert_that_no_card_can_stage_has_no_plan() -> None:
    layer = bank(RouterRule(experts=2, top=1), size=8192, inner=32)

    assert plan_of(layer, (82, 99 << 10)) is None


def test_tables_list_each_panel_of_each_matrix_once() -> None:
    rule, options = LAYERS["wide"]  # down in parts
    layer = bank(rule, **options)
    plan = plan_of(layer, (132, 227 << 10))
    assert plan is not None
    stored = next(t for t in plan.tensors if t.data_ptr() == plan.argument["of"]).numpy()
    table = stored[: len(layer.experts) * EXPERT.itemsize].view(EXPERT)

    def steps(side: np.void, begin: int, end: int) -> np.ndarray:
        at = int(side["steps"]) - int(plan.argument["of"])
        return stored[at + 16 * begin : at + 16 * end].view(np.int32).reshape(-1, 4)

    for entry, (gate, up, down) in zip(table, layer.experts, strict=True):
        parts = int(entry["down"]["parts"])
        lists = [("up", i, matrix, 0) for i, matrix in enumerate((gate, up))]
        lists += [("down", i, down, i * int(plan.argument["part_rows"])) for i in range(parts)]
        found: dict[int, list[int]] = {}
        for side, place, matrix, first in lists:
            begins = entry[side]["begins"]
            for kind, word, panel, _ in steps(entry[side], begins[place], begins[place + 1]):
                panels = range(first // 32 + panel, first // 32 + panel + (kind >> 4 & 7))
                assert 4 * matrix.panels()[panels.start].word == word
                found.setdefault(id(matrix), []).extend(panels)
        for matrix in (gate, up, down):
            assert found[id(matrix)] == [*range(len(matrix.order) // 32)]
    assert int(plan.argument["shares"]) == rule.top * int(table[0]["down"]["parts"])


def test_places_are_those_of_the_order_as_it_is_staged() -> None:
    rule, options = LAYERS["mixtral"]
    layer = bank(rule, **options)
    plan = plan_of(layer, (132, 227 << 10))
    assert plan is not None

    [places] = [t for t in plan.tensors if t.dtype == torch.uint16 and t.shape[1] == 128]

    for expert, found in zip(layer.experts, places.int(), strict=True):
        paired = [8 * (p // 8) + (0, 2, 1, 3, 4, 6, 5, 7)[p % 8] for p in range(128)]
        assert [paired[p] for p in expert.up.order.argsort().tolist()] == found.tolist()
