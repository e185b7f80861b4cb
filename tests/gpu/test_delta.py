"""The gated delta rule on the GPU against the torch twin, and texts of models that have it."""

import random
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from delta_layers import delta_layer
from tiny import TOKENIZER_SIZE, make_tiny

from exl2flow.inference import Generator, NgramDraft, Request, SamplingSettings, load_model
from exl2flow.inference.drafts import Drafter
from exl2flow.kernels import PAGE_TOKENS, DeltaArgs, DeltaSlots, get_ops
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
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_step_is_the_twins_step(count: int, heads: tuple[int, int]) -> None:
    args = layer(*heads)
    # nothing pending, a few, over a page border, no part in the step, and all
    behind = [300, 0, PAGE_TOKENS - 3, 40, 2 * PAGE_TOKENS - 8]
    lengths = torch.tensor([300, 2, PAGE_TOKENS + 2, 0, 2 * PAGE_TOKENS], device=DEVICE).int()
    found = random_slots(args, behind)
    expected = replace(found, **{f.name: getattr(found, f.name).clone() for f in fields(found)})
    before = found.inputs.clone()
    x = torch.randn(SLOTS, count, HIDDEN, device=DEVICE).half()
    qkv = torch.randn(SLOTS, count, len(args.conv), device=DEVICE).half()
    z = torch.randn(SLOTS, count, args.value_heads * DIM, device=DEVICE).half()

    y = get_ops(DEVICE).delta_step(x, qkv, z, args, found, lengths)
    twin = torch_delta.delta_step(x, qkv, z, args, expected, lengths)

    torch.testing.assert_close(y, twin, rtol=4e-3, atol=4e-3)
    for field in fields(found):
        mine, twins = getattr(found, field.name), getattr(expected, field.name)
        if field.name in PENDING:
            mine, twins = mine[:, :count], twins[:, :count]
        torch.testing.assert_close(mine, twins, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.inputs[3], before[3])
    assert found.aside_at.tolist() == [0, 0, PAGE_TOKENS, 0, 2 * PAGE_TOKENS]

    states = [x.clone() for x in (found.state, found.behind, found.aside, found.inputs)]
    again = get_ops(DEVICE).delta_step(x, qkv, z, args, found, lengths)
    assert torch.equal(again, y)
    after = (found.state, found.behind, found.aside, found.inputs)
    assert all(torch.equal(a, b) for a, b in zip(after, states, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("draft", [None, NgramDraft(tokens=3)])
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
