"""The gated delta rule: chunks against tokens, and cuts."""

import random
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from delta_layers import delta_layer

from exl2flow.kernels import (
    CHUNK_TOKENS,
    PAGE_TOKENS,
    RING,
    STEP_TOKENS,
    DeltaArgs,
    DeltaSegment,
    DeltaSlots,
    DeltaState,
)
from exl2flow.kernels.reference.delta import delta_scan, delta_step, gated_delta

HIDDEN, KEY_HEADS, VALUE_HEADS, DIM = 48, 2, 4, 32
OF_TEXT = ("state", "behind", "inputs", "aside", "aside_inputs", "aside_at")
CHANNELS, WIDTH = (2 * KEY_HEADS + VALUE_HEADS) * DIM, VALUE_HEADS * DIM


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # what the rule reads


def layer(seed: int = 0) -> DeltaArgs:
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return delta_layer(drawn, key_heads=KEY_HEADS, value_heads=VALUE_HEADS, dim=DIM, hidden=HIDDEN)


def three(given: Iterable[torch.Tensor]) -> Three:
    x, qkv, z = given
    return x, qkv, z


def inputs(count: int, batch: int = 2) -> Three:
    generator = torch.Generator().manual_seed(count)
    return three(
        torch.randn(batch, count, width, generator=generator) for width in (HIDDEN, CHANNELS, WIDTH)
    )


@pytest.mark.parametrize("count", [1, 24, 64, 80, 300])
def test_chunks_are_what_tokens_are(count: int) -> None:
    args, given = layer(), inputs(count)
    expected, state = gated_delta(*given, args, in_chunks=False)

    found, found_state = gated_delta(*given, args)

    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(found_state.state, state.state, rtol=0, atol=2e-5)
    assert torch.equal(found_state.inputs, state.inputs)
    assert expected.std() > 0.1


def in_parts(
    given: tuple[torch.Tensor, ...], cuts: tuple[int, ...], args: DeltaArgs
) -> tuple[torch.Tensor, DeltaState]:
    """Read a text part after part."""
    outputs, state = list[torch.Tensor](), DeltaState.empty(args, len(given[0]))
    for begin, end in zip((0, *cuts), (*cuts, given[0].shape[1]), strict=True):
        x, qkv, z = (y[:, begin:end] for y in given)
        output, state = gated_delta(x, qkv, z, args, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize(
    "cuts", [(64,), (128, 192), (64, 128, 192, 256), (1,), (3, 100), (63, 65, 191)], ids=str
)
def test_cuts_between_chunks_change_no_bit_and_others_a_rounding(cuts: tuple[int, ...]) -> None:
    args, given = layer(), inputs(300)
    most = 2e-5 if any(cut % CHUNK_TOKENS for cut in cuts) else 0
    expected, state = gated_delta(*given, args)

    found, found_state = in_parts(given, cuts, args)

    torch.testing.assert_close(found, expected, rtol=0, atol=most)
    torch.testing.assert_close(found_state.state, state.state, rtol=0, atol=most)


def test_gradients_are_those_of_the_rule_by_tokens() -> None:
    args, found = layer(), list[list[torch.Tensor]]()
    weights = torch.randn(2, 90, WIDTH, generator=torch.Generator().manual_seed(1))
    for in_chunks in (True, False):
        given = [y.requires_grad_() for y in inputs(90)]
        output, _ = gated_delta(*given, args, in_chunks=in_chunks)
        found.append(list(torch.autograd.grad((output * weights).sum(), given)))
    for chunked, by_token in zip(*found, strict=True):
        assert by_token.abs().max() > 0.1
        torch.testing.assert_close(chunked, by_token, rtol=1e-3, atol=1e-4)


def empty_slots(count: int) -> DeltaSlots:
    return DeltaSlots.empty(
        count,
        value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        channels=CHANNELS,
        taps=4,
        element=torch.float32,
        device="cpu",
    )


def read(slots: DeltaSlots, args: DeltaArgs, given: tuple[torch.Tensor, ...], *where: int) -> None:
    """Read tokens `begin` to `end` of the first text in `given` into a slot."""
    slot, begin, end = where
    segment = DeltaSegment(slot=slot, begin=begin, start=0, count=end - begin)
    delta_scan(*(y[:1, begin:end] for y in given), args, slots, [segment])


def test_drafts_may_be_taken_back_and_steps_repeated() -> None:
    args, given, source = layer(), inputs(700, batch=1), random.Random(0)
    wrong = inputs(701, batch=1)
    slots, length = empty_slots(2), 250
    read(slots, args, given, 0, 0, length)
    read(slots, args, given, 1, 0, 23)  # and takes no part
    beside = [getattr(slots, name)[1].clone() for name in OF_TEXT]
    expected, whole = empty_slots(1), empty_slots(1)
    read(expected, args, given, 0, 0, length)
    while length < 560:
        drafted = source.randint(1, STEP_TOKENS)
        right = source.randint(1, drafted)
        tokens = [
            torch.cat([y[:, length : length + right], w[:, : drafted - right]], dim=1)
            for y, w in zip(given, wrong, strict=True)
        ]
        lengths = torch.tensor([length, 0], dtype=torch.int32)
        both = three(y.repeat(2, 1, 1) for y in tokens)
        found = delta_step(*both, args, slots, lengths)
        states = slots.state.clone(), slots.aside.clone(), slots.behind.clone()
        for _ in range(source.randint(0, 2)):
            again = delta_step(*both, args, slots, lengths)
            assert torch.equal(again[0], found[0])
            now = slots.state, slots.aside, slots.behind
            assert all(torch.equal(a, b) for a, b in zip(now, states, strict=True))
        for at in range(length, length + right):
            one = delta_step(
                *three(y[:, at : at + 1] for y in given),
                args,
                expected,
                torch.tensor([at], dtype=torch.int32),
            )
            torch.testing.assert_close(one[0, 0], found[0, at - length], rtol=0, atol=1e-5)
        length += right
        for name, before in zip(OF_TEXT, beside, strict=True):
            assert torch.equal(getattr(slots, name)[1], before)

    assert int(slots.aside_at[0]) == 2 * PAGE_TOKENS
    read(whole, args, given, 0, 0, 2 * PAGE_TOKENS)
    torch.testing.assert_close(slots.aside[0], whole.state[0], rtol=0, atol=2e-5)
    places = [at % RING for at in range(2 * PAGE_TOKENS - 3, 2 * PAGE_TOKENS)]
    assert torch.equal(slots.aside_inputs[0], whole.inputs[0, places])


def test_any_number_of_pending_tokens_may_be_taken_back_also_over_a_page_border() -> None:
    args, given, begin = layer(), inputs(PAGE_TOKENS + 20, batch=1), PAGE_TOKENS - 7
    for kept in range(STEP_TOKENS + 1):
        slots, whole, end = empty_slots(1), empty_slots(1), begin + kept
        read(slots, args, given, 0, 0, begin)
        drafted = [torch.cat([y[:, begin:end], -y[:, end : begin + STEP_TOKENS]], 1) for y in given]
        delta_step(*three(drafted), args, slots, torch.tensor([begin], dtype=torch.int32))

        one = three(y[:, end : end + 1] for y in given)
        found = delta_step(*one, args, slots, torch.tensor([end], dtype=torch.int32))

        read(whole, args, given, 0, 0, end)
        expected, _ = gated_delta(*(y[:, : end + 1] for y in given), args)
        torch.testing.assert_close(found[0, 0], expected[0, -1], rtol=0, atol=2e-5)
        for name in ("state", "aside"):
            both = getattr(slots, name), getattr(whole, name)
            torch.testing.assert_close(*both, rtol=0, atol=2e-5)
        for name in ("behind", "aside_at", "aside_inputs"):
            assert torch.equal(getattr(slots, name), getattr(whole, name)), (name, kept)


@pytest.mark.parametrize("cuts", [(64, 128, 448), (256, 512), (100, 101, 517)])
def test_prompts_are_read_in_parts(cuts: tuple[int, ...]) -> None:
    args, given = layer(), inputs(600, batch=1)
    expected, found = empty_slots(1), empty_slots(3)
    read(expected, args, given, 0, 0, 600)

    for begin, end in zip((0, *cuts), (*cuts, 600), strict=True):
        read(found, args, given, 2, begin, end)

    if all(cut % CHUNK_TOKENS == 0 for cut in cuts):
        assert torch.equal(found.state[2], expected.state[0])
        assert torch.equal(found.aside[2], expected.aside[0])
    torch.testing.assert_close(found.state[2], expected.state[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(found.aside[2], expected.aside[0], rtol=0, atol=2e-5)
    assert int(found.aside_at[2]) == int(expected.aside_at[0]) == 512
    places = [at % RING for at in range(597, 600)]
    assert torch.equal(found.inputs[2, places], expected.inputs[0, places])
    assert not found.state[:2].any()


def test_prompts_of_several_slots_are_read_in_one_pass() -> None:
    args, given, slots = layer(), inputs(300, batch=2), empty_slots(3)
    first, second = (three(y[i : i + 1] for y in given) for i in range(2))
    pairs = zip(first, second, strict=True)
    both = three(torch.cat([a[:, :300], b[:, :70]], dim=1) for a, b in pairs)
    segments = [
        DeltaSegment(slot=2, begin=0, start=0, count=300),
        DeltaSegment(slot=0, begin=0, start=300, count=70),
    ]

    found = delta_scan(*both, args, slots, segments)

    expected = [gated_delta(*given, args)[0] for given in (first, second)]
    for mine, twin in ((found[:, :300], expected[0]), (found[:, 300:], expected[1][:, :70])):
        torch.testing.assert_close(mine, twin, rtol=0, atol=1e-5)
    assert slots.behind.tolist() == [[at] * VALUE_HEADS for at in (70, 0, 300)]
