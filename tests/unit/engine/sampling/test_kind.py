"""A kind has all steps that its settings need, and neutral values change nothing."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from sampled import PLAIN, slots_of

from exl2flow.core.options.sampling import NEUTRALS, SamplingSettings
from exl2flow.engine.sampling import Kind, sample

VOCAB, HISTORY = 12, [3, 1, 2, 3, 1, 2, 3, 1]
DRAWS = [n / 8 for n in range(8)]
LOGITS = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
SWITCHES = {n.name: True for n in fields(Kind) if n.type in (bool, "bool")}
ALL = Kind(most=None, top=VOCAB, dry=32, **SWITCHES)
BASE = replace(PLAIN, min_temp=0.5, dry_allowed_length=1, dry_breakers=())
# where 0.7 is not allowed or changes nothing
OTHERS: dict[str, Any] = {"max_temp": 1.5, "top_k": 3, "xtc_probability": 1.0, "cfg_scale": 1.5}


def sampled_by(kind: Kind, settings: SamplingSettings) -> list[float]:
    """Return the distribution of the first text, Mirostat's bound, and ids of draws."""
    ids = list[int]()
    for draw in DRAWS:
        slots = slots_of([settings, PLAIN], VOCAB, histories=[HISTORY, HISTORY])
        if settings.cfg_scale is not None:
            slots.pair(0, 1)
        found = sample(LOGITS, slots, torch.tensor([draw, draw], dtype=torch.float64), kind)
        ids.append(int(found.ids[0]))
    assert found.top_ids is not None
    assert found.top_probabilities is not None
    by_id = dict(zip(found.top_ids[0].tolist(), found.top_probabilities[0].tolist(), strict=True))
    return [*(by_id[i] for i in range(VOCAB)), float(slots.mu[0]), *ids]


def needed_by(settings: SamplingSettings) -> Kind:
    kind = Kind.of([settings, PLAIN], top=VOCAB, probabilities=True)
    return replace(kind, most=None, top=VOCAB)


@pytest.mark.parametrize("name", NEUTRALS)
def test_no_step_is_left_out_that_a_setting_needs(name: str) -> None:
    value = {bool: not getattr(BASE, name), int: 4}.get(type(getattr(BASE, name)), 0.7)
    settings = replace(BASE, **{name: OTHERS.get(name, value)})

    assert sampled_by(needed_by(settings), settings) == pytest.approx(sampled_by(ALL, settings))


@pytest.mark.parametrize("name", [name for name, one in NEUTRALS.items() if one.step])
def test_a_setting_with_a_step_changes_something(name: str) -> None:
    late = {"temperature": 0.5} if name == "temperature_last" else {}
    base = replace(BASE, **late, **({"min_p": 0.3} if late else {}))
    value = True if isinstance(getattr(base, name), bool) else OTHERS.get(name, 0.7)
    settings = replace(base, **{name: value})

    assert needed_by(settings) != needed_by(base)
    assert sampled_by(needed_by(settings), settings) != pytest.approx(
        sampled_by(needed_by(base), base)
    )


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, one in NEUTRALS.items() for value in one.values]
)
def test_neutral_values_change_nothing(name: str, value: float | None) -> None:
    settings = replace(BASE, **{name: value})

    assert needed_by(settings) == needed_by(BASE)
    assert sampled_by(ALL, settings) == pytest.approx(sampled_by(ALL, BASE))
