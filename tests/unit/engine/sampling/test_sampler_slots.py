"""Slots of the sampler: sequences that enter, leave, move and go back."""

from dataclasses import replace

import pytest
import torch
from sampled import PLAIN, slots_of

from exl2flow.core.errors import InferenceError
from exl2flow.engine.sampling import Kind, SamplerSlots, SamplingSettings
from exl2flow.engine.sampling import sample as sample_rows

VOCAB = 40
PENALIZED = replace(
    PLAIN, frequency_penalty=0.7, dry_multiplier=0.5, dry_allowed_length=1, dry_breakers=(0,)
)
STATEFUL = replace(PENALIZED, mirostat=True, token_bias=((3, 1.0),), cfg_scale=1.2)
DRAWS = torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LOGITS = torch.randn(60, 2, VOCAB, generator=torch.Generator().manual_seed(1))


def empty(slots: int = 4) -> SamplerSlots:
    return SamplerSlots(slots=slots, max_tokens=64, vocab_size=VOCAB, width=VOCAB, device="cpu")


def run(slots: SamplerSlots, steps: range, at: int = 0, negative: int | None = None) -> list[int]:
    """Return the ids that steps sample at a slot, and perhaps its pair."""
    made, kind = [], Kind.of([STATEFUL], masked=True)
    for step in steps:
        logits = torch.zeros(4, VOCAB)
        logits[at] = LOGITS[step, 0]
        if negative is not None:
            logits[negative] = LOGITS[step, 1]
        made.append(int(sample_rows(logits, slots, DRAWS[step].expand(4), kind).ids[at]))
    return made


def test_histories_hold_the_prompt_and_what_was_sampled() -> None:
    slots = empty()
    slots.enter(1, PENALIZED, [5, 6, VOCAB + 3, -1])

    made = run(slots, range(3), at=1)

    assert slots.counts.tolist() == [0, 7, 0, 0]
    assert slots.history[1, :8].tolist() == [5, 6, VOCAB, VOCAB, *made, VOCAB]
    assert (slots.history[[0, 2, 3], :64] == VOCAB).all()


def test_a_full_history_keeps_what_it_has() -> None:
    slots = empty()
    slots.enter(0, PENALIZED, [1] * 63)

    run(slots, range(3))

    assert slots.counts[0] == 64
    with pytest.raises(InferenceError, match="65 ids exceed a history of 64"):
        slots.enter(0, PENALIZED, [1] * 65)


def test_slots_that_were_left_stand_still() -> None:
    slots = empty()
    slots.enter(0, STATEFUL, [1, 2])
    run(slots, range(3))
    slots.leave(0)
    mu = float(slots.mu[0])

    run(slots, range(3, 6))

    assert (int(slots.counts[0]), float(slots.mu[0])) == (5, mu)


def test_a_cut_history_goes_on_as_if_the_rest_had_not_been() -> None:
    slots = empty()
    slots.enter(0, PENALIZED, [1, 2, 3])
    expected = run(slots, range(20))

    slots.cut(0, 3 + 8)

    assert run(slots, range(8, 20)) == expected[8:]


def test_a_sequence_that_enters_again_goes_on() -> None:
    slots = empty()
    slots.enter(0, STATEFUL, [1, 2, 3])
    expected = run(slots, range(20))
    slots.enter(0, STATEFUL, [1, 2, 3])
    begun = run(slots, range(9))
    mu = float(slots.mu[0])
    slots.leave(0)
    slots.enter(0, PLAIN, [9, 9])
    run(slots, range(2))

    slots.enter(3, STATEFUL, [1, 2, 3, *begun], mu=mu)

    assert run(slots, range(9, 20), at=3) == expected[9:]


@pytest.mark.parametrize(("lead", "negative"), [(2, 1), (0, 3), (3, 2)])
def test_everything_moves_with_a_slot(lead: int, negative: int) -> None:
    words = torch.tensor([-(2**30), 7], dtype=torch.int32)

    def begun() -> SamplerSlots:
        slots = empty()
        for slot in (0, 1):
            slots.enter(slot, STATEFUL, [1, 2, 3])
            slots.allow({slot: words})
        slots.pair(0, 1)
        return slots

    slots = begun()
    expected = run(slots, range(20), at=0, negative=1)
    moved = begun()
    assert run(moved, range(7), at=0, negative=1) == expected[:7]
    if lead != 0:
        moved.move(0, lead)
    if negative != 1:
        moved.move(1, negative)

    assert run(moved, range(7, 20), at=lead, negative=negative) == expected[7:]
    assert moved.active.tolist() == [int(slot in (lead, negative)) for slot in range(4)]
    assert torch.equal(moved.history[lead, :64], moved.history[negative, :64])


def test_a_pair_ends_with_either_slot() -> None:
    for gone in (0, 1):
        slots = empty()
        for slot in (0, 1):
            slots.enter(slot, STATEFUL, [])
        slots.pair(0, 1)
        assert (slots.partner.tolist(), slots.lead.tolist()) == ([1, 1, 2, 3], [0, 0, 2, 3])

        slots.leave(gone)

        assert slots.partner.tolist() == slots.lead.tolist() == [0, 1, 2, 3]


def test_a_new_sequence_takes_nothing_over() -> None:
    slots = empty()
    special = replace(STATEFUL, dry_breakers=(1, 2, 3), xtc_ignored=(4,))
    slots.enter(0, special, [1] * 30)
    slots.allow({0: torch.zeros(2, dtype=torch.int32)})
    run(slots, range(2))
    fresh = empty()
    for each in (slots, fresh):
        each.enter(0, PENALIZED, [1, 2])

    assert run(slots, range(10)) == run(fresh, range(10))
    for name in ("table", "counts", "mu"):
        assert torch.equal(getattr(slots, name)[0], getattr(fresh, name)[0])
    for name in ("bias", "allowed", "breakers", "ignored"):
        assert torch.equal(slots.late(name)[0], fresh.late(name)[0])
    assert torch.equal(slots.history[0, :64], fresh.history[0, :64])


def test_masks_and_biases_take_memory_when_they_are_used() -> None:
    slots = empty()
    before = len(slots.tensors())

    slots.enter(0, SamplingSettings(), [1])
    assert len(slots.tensors()) == before
    slots.enter(0, replace(PLAIN, token_bias=((1, 1.0),)), [1])
    slots.allow({1: torch.zeros(2, dtype=torch.int32)})
    assert len(slots.tensors()) == before + 2
    assert slots.late("bias")[0, 1] == 1
    assert slots.late("allowed").tolist() == [[-1, -1], [0, 0], [-1, -1], [-1, -1]]
    slots.enter(0, SamplingSettings(), [1])
    assert not slots.late("bias").any()


def test_one_settings_object_serves_many_sequences() -> None:
    slots = slots_of([STATEFUL] * 4, VOCAB)
    draws = torch.full((4,), 0.4, dtype=torch.float64)

    for step in range(5):
        ids = sample_rows(LOGITS[step, :1].expand(4, -1), slots, draws, Kind.of([STATEFUL])).ids
        assert len(set(ids.tolist())) == 1
