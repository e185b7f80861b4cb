"""What a cut text leaves on the device: the next token follows from what is left of it."""

import math
import random
from pathlib import Path

import pytest
import torch
from tiny import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from exl2flow.inference import Event, Generator, LoadedModel, Request, SamplingSettings

GREEDY = SamplingSettings.greedy()
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)
PROMPTS = [
    tuple(random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(4 + 9 * seed))
    for seed in (1, 3)
]


def test_decoded_tokens_are_never_prefilled(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, passes = Generator(model, tokens=2048, slots=2), list[int]()
    read = generator._device_slots.read
    monkeypatch.setattr(
        generator._device_slots,
        "read",
        lambda ids, *rest, **more: (passes.append(len(ids)), read(ids, *rest, **more)),
    )

    bans = {"banned_strings": ("a", "e", "5"), "settings": HOT, "seed": 1}
    for options in ({"settings": GREEDY}, bans):
        text = generator.generate([[5, 6, 7, 8]], max_new_tokens=300, stops=(), **options)

    assert text
    assert passes == [3]  # the second time, the prompt comes from the cache


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_with_bans_is_greedy_but_for_what_was_cut(
    prompt: tuple[int, ...], folder: Path, model: LoadedModel
) -> None:
    cuts = list[tuple[int, int]]()
    request = Request(
        prompt, max_new_tokens=40, settings=GREEDY, stops=(), banned_strings=("a", "e", "5")
    )

    def note(event: Event) -> None:
        if event.suppressed_ids:
            cuts.append((len(prompt) + len(job.output.ids) - 1, event.suppressed_ids[0]))

    generator = Generator(model, tokens=1024)
    job = generator.submit(request, deliver=note)
    while not generator.is_idle:
        generator.step()

    ids = [*prompt, *job.output.ids]
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = judge(torch.tensor([ids])).logits[0, :, : model.tokenizer.vocab_size]
    for at, token in cuts:
        logits[at, token] = -math.inf
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :]
    assert cuts
