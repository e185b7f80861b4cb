"""The gated delta rule on the GPU against the torch twin, and texts of models that have it."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from delta_layers import delta_layer
from tiny import TOKENIZER_SIZE, make_tiny

from exl2flow.engine.drafts import Drafter
from exl2flow.inference import Generator, NgramDraft, Request, SamplingSettings, load_model
from exl2flow.kernels import (
    PAGE_TOKENS,
    STEP_TOKENS,
    DeltaArgs,
    DeltaSegment,
    DeltaSlots,
    get_ops,
)
from exl2flow.kernels.reference import delta as torch_delta

pytestmark = pytest.mark.gpu

DEVICE, HIDDEN, DIM, SLOTS = "cuda", 96, 128, 5
PENDING = ("keys", "deltas", "decays")


def layer(key_heads: int, value_heads: int) -> DeltaArgs:
    drawn = partial(torch.randn, device=DEVICE)
    return delta_layer(drawn, key_heads=key_heads, value_heads=value_heads, dim=DIM, hidden=HIDDEN)


def random_slots(args: DeltaArgs, behind: list[int]) -> DeltaSlots:
    """Return states of texts in the middle, with pending tokens."""
    slots = DeltaSlots.empty(
        SLOTS,
        value_heads=args.value_heads,
        key_dim=DIM,
        value_dim=DIM,
        channels=len(args.conv),
        taps=4,
        element=torch.float16,
        device=DEVICE,
    )
    for name in ("state", "keys", "deltas", "inputs", "aside", "aside_inputs"):
        x = getattr(slots, name)
        x.copy_(torch.randn(x.shape, device=DEVICE) * (DIM**-0.5 if name == "keys" else 1.0))
    slots.decays.copy_(-torch.rand(slots.decays.shape, device=DEVICE))
    slots.behind.copy_(torch.tensor(behind, device=DEVICE)[:, None])
    return slots


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (16, 48)])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 11, 16])
def test_a_step_is_the_twins_step(count: int, heads: tuple[int, int]) -> None:
    args = layer(*heads)
    # nothing pending, a few, over a page border, no part in the step, and all
    behind = [300, 0, PAGE_TOKENS - 3, 40, 2 * PAGE_TOKENS - STEP_TOKENS]
    lengths = torch.tensor([300, 2, PAGE_TOKENS + 9, 0, 2 * PAGE_TOKENS], device=DEVICE).int()
    found = random_slots(args, behind)
    expected = copied(found)
    before = found.inputs.clone()
    x = torch.randn(SLOTS, count, HIDDEN, device=DEVICE).half()
    qkv = torch.randn(SLOTS, count, len(args.conv), device=DEVICE).half()
    z = torch.randn(SLOTS, count, args.value_heads * DIM, device=DEVICE).half()

    y = get_ops(DEVICE).delta_step(x, qkv, z, args, found, lengths)
    twin = torch_delta.delta_step(x, qkv, z, args, expected, lengths)

    torch.testing.assert_close(y, twin, rtol=4e-3, atol=4e-3)
    for name, mine in found.named.items():
        twins = expected.named[name]
        if name in PENDING:
            mine, twins = mine[:, :count], twins[:, :count]
        torch.testing.assert_close(mine, twins, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.inputs[3], before[3])
    assert found.aside_at.tolist() == [0, 0, PAGE_TOKENS, 0, 2 * PAGE_TOKENS]

    to = torch.randperm(args.value_heads * DIM, device=DEVICE).int()
    elsewhere = get_ops(DEVICE).delta_step(x, qkv, z, args, copied(found), lengths, to)
    assert torch.equal(elsewhere[..., to.long()], y)

    states = [x.clone() for x in (found.state, found.behind, found.aside, found.inputs)]
    again = get_ops(DEVICE).delta_step(x, qkv, z, args, found, lengths)
    assert torch.equal(again, y)
    after = (found.state, found.behind, found.aside, found.inputs)
    assert all(torch.equal(a, b) for a, b in zip(after, states, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("draft", [None, NgramDraft(tokens=3), NgramDraft()])
def test_texts_are_what_the_model_says(draft: Drafter | None, tmp_path: Path) -> None:
    folder = make_tiny("qwen3.5", tmp_path / "model", dtype=torch.float16)
    model = load_model(folder, device=DEVICE, max_tokens=2048)
    source = random.Random(0)
    generator = Generator(model, tokens=8192, slots=3, draft=draft)
    prompts = [[source.randrange(5, 299) for _ in range(n)] for n in (1, 3, 70, 250, 600, 600)]
    prompts.append([*prompts[-1][:550], 7, 8, 9])
    texts: dict[int, list[int]] = {tag: [] for tag in range(len(prompts))}
    requests = [
        Request(
            ids,
            max_new_tokens=40,
            settings=SamplingSettings.greedy(),
            stops=(),
            end_loops=False,
            tag=tag,
        )
        for tag, ids in enumerate(prompts)
    ]
    for event in generator.stream(*requests):
        assert event.error is None
        texts[event.tag] += event.ids  # type: ignore[index]  # tags are numbers

    for tag, ids in enumerate(prompts):
        whole = torch.tensor([[*ids, *texts[tag]]], device=DEVICE)
        logits = model.decoder.forward(whole)[0, len(ids) - 1 : -1, :TOKENIZER_SIZE]
        chosen = logits.gather(1, whole[0, len(ids) :, None])[:, 0]
        assert len(texts[tag]) == 40
        assert (logits.max(dim=1).values - chosen).max() <= 0.05 * logits.std()


def test_any_number_of_pending_tokens_may_be_taken_back() -> None:
    args = layer(2, 4)
    found = random_slots(args, [PAGE_TOKENS - 7] * SLOTS)
    drawn = partial(torch.randn, SLOTS, STEP_TOKENS, device=DEVICE)
    given = [drawn(size).half() for size in (HIDDEN, len(args.conv), args.value_heads * DIM)]
    lengths = found.behind[:, 0].clone()
    get_ops(DEVICE).delta_step(*given, args, found, lengths)
    for kept in range(STEP_TOKENS + 1):
        mine, twin = copied(found), copied(found)
        one = [x[:, :1].contiguous() for x in given]

        y = get_ops(DEVICE).delta_step(*one, args, mine, lengths + kept)

        expected = torch_delta.delta_step(*one, args, twin, lengths + kept)
        torch.testing.assert_close(y, expected, rtol=4e-3, atol=4e-3)
        for name, x in mine.named.items():
            if name not in PENDING:
                torch.testing.assert_close(x, twin.named[name], rtol=1e-4, atol=1e-4)


def copied(slots: DeltaSlots) -> DeltaSlots:
    return replace(slots, **{name: x.clone() for name, x in slots.named.items()})


# Where texts begin and end: empty, behind a part of a chunk, over page borders, within a chunk
SPANS = [
    [(0, 64)],
    [(0, 700)],
    [(0, 3), (37, 38), (255, 257)],
    [(192, 512), (0, 130), (500, 530), (1024, 1300), (64, 67)],
]


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (16, 48)])
@pytest.mark.parametrize("spans", SPANS)
def test_a_prompt_is_read_as_the_twin_reads_it(
    spans: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    args = layer(*heads)
    slots = [3, 0, 4, 1, 2][: len(spans)]
    behind = [0] * SLOTS
    segments, start = list[DeltaSegment](), 0
    for slot, (begin, end) in zip(slots, spans, strict=True):
        behind[slot] = begin
        segments.append(DeltaSegment(slot=slot, begin=begin, start=start, count=end - begin))
        start += end - begin
    found = random_slots(args, behind)
    found.aside_at.fill_(7)
    expected = copied(found)
    x = torch.randn(1, start, HIDDEN, device=DEVICE).half()
    qkv = torch.randn(1, start, len(args.conv), device=DEVICE).half()
    z = torch.randn(1, start, args.value_heads * DIM, device=DEVICE).half()

    y = get_ops(DEVICE).delta_scan(x, qkv, z, args, found, segments)
    twin = torch_delta.delta_scan(x, qkv, z, args, expected, segments)

    error = (y.float() - twin.float()).norm() / twin.float().norm()

    assert error <= 2e-3
    for name, mine in found.named.items():
        twins = expected.named[name]
        if name in ("state", "aside"):
            assert (mine - twins).norm() <= 2e-3 * twins.norm()
        else:
            assert torch.equal(mine, twins), name


def test_a_prompt_in_parts_leaves_the_same_bits() -> None:
    args, count = layer(2, 4), 640
    x = torch.randn(1, count, HIDDEN, device=DEVICE).half()
    qkv = torch.randn(1, count, len(args.conv), device=DEVICE).half()
    z = torch.randn(1, count, args.value_heads * DIM, device=DEVICE).half()
    read = get_ops(DEVICE).delta_scan
    at_once, in_parts = (random_slots(args, [0] * SLOTS) for _ in range(2))
    whole = read(x, qkv, z, args, at_once, [DeltaSegment(slot=1, begin=0, start=0, count=count)])

    parts = list[torch.Tensor]()
    for begin, end in ((0, 64), (64, 320), (320, 448), (448, 640)):
        segment = DeltaSegment(slot=1, begin=begin, start=0, count=end - begin)
        of_x, of_qkv, of_z = (y[:, begin:end].contiguous() for y in (x, qkv, z))
        parts.append(read(of_x, of_qkv, of_z, args, in_parts, [segment]))

    assert torch.equal(torch.cat(parts, dim=1), whole)
    for name in ("state", "aside", "behind", "aside_at", "aside_inputs"):
        assert torch.equal(getattr(at_once, name)[1], getattr(in_parts, name)[1]), name


@torch.inference_mode()
def test_equal_prompts_wait_for_the_one_that_reads(tmp_path: Path) -> None:
    folder = make_tiny("qwen3.5", tmp_path / "model", dtype=torch.float16)
    model = load_model(folder, device=DEVICE, max_tokens=2048)
    generator, ids = Generator(model, tokens=8192, slots=3), [7 + i % 200 for i in range(1500)]
    jobs = [generator.submit(Request(ids, max_new_tokens=2, tag=tag, stops=())) for tag in range(3)]
    while not generator.is_idle:
        generator.step()

    read = [job.statistics().prompt_tokens - job.statistics().cached_tokens for job in jobs]
    assert sorted(read) == [1500 % PAGE_TOKENS] * 2 + [1500]
