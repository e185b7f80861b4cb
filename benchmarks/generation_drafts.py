"""What drafts bring: modes of `generation.py`."""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from generation_jobs import GREEDY

from exl2flow.engine.cache.paged import PagedCache, cache_format, pages_of
from exl2flow.engine.drafts import Drafter, DraftKind, DraftRequest, Proposal
from exl2flow.engine.drafts.proposer import HostProposer
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.draft_positions import restored
from exl2flow.engine.sampling import Kind
from exl2flow.inference import Event, Generator, LoadedModel, NgramDraft, Request
from exl2flow.model import ModelSpec, Placement

PROMPTS = (
    "The history of the city begins with",
    "In 1944 the regiment was",
    "The species was first described",
)


@dataclass
class Known(HostProposer):
    """Guesses a known text, each token right with a probability."""

    text: Sequence[int]
    right: float
    tokens: int = 4
    model, reads_states = None, False

    def beside(self, *_: object) -> list[tuple[ModelSpec, Placement]]:
        return []

    def start(self, *_: object) -> "Known":
        self._random = random.Random(0)
        return self

    def wants(self, wanted: DraftRequest) -> bool:
        return wanted.most(DraftKind.MODEL) > 0

    def propose(self, wanted: Mapping[int, DraftRequest]) -> dict[int, Proposal]:
        return {slot: Proposal(self._guess(one), DraftKind.MODEL) for slot, one in wanted.items()}

    def _guess(self, wanted: DraftRequest) -> list[int]:
        end = len(wanted.ids) + min(self.tokens, wanted.most(DraftKind.MODEL))
        known = self.text[len(wanted.ids) : end]
        return [token if self._random.random() < self.right else 5 for token in known]


@torch.inference_mode()
def verified(model: LoadedModel, form: str, *, context: int, drafted: int) -> float:
    """Return the median seconds of a step of one row that verifies so many wrong guesses."""
    device, pages = torch.device("cuda"), pages_of(context + 64)
    cache = PagedCache(model.spec, pages=pages, form=cache_format(form, device), device=device)
    draft = Known([], 0.0, max(drafted, 1))
    steps = DeviceSlots(model, cache, slots=1, max_tokens=context + 64, draft=draft)
    steps.enter(0, [*range(pages)], [5] * context, GREEDY, None)
    kind, times = Kind.of([GREEDY]), list[float]()
    for _ in range(25):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        steps.forward(1, {0: [6] * drafted})
        with restored(steps.sampler.active) if drafted else nullcontext():
            steps.positions.prepare([[0.5]] * (1 + drafted))
            if drafted:
                steps.positions.verify([drafted], steps.ids)
            for place in range(1 + drafted):
                steps.sample(1, kind, after_draft=place > 0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return median(times[5:])


def spoken(
    model: LoadedModel, form: str, draft: Drafter | None, prompt: object, tokens: int = 200
) -> tuple[list[int], float, Event]:
    """Return the ids of a greedy text, tokens per second without the prompt, and the last event."""
    generator = Generator(model, cache=form, tokens=1024, slots=1, draft=draft)
    generator.warmup()
    for count in (20, tokens):  # the first time, kernels are compiled
        request = Request(prompt, settings=GREEDY, stops=(), max_new_tokens=count)
        events = [*generator.stream(request)]
    counts = events[-1].statistics
    assert counts is not None
    ids = [token for event in events for token in event.ids]
    return ids, (len(ids) - 1) / counts.text_seconds, events[-1]


def draft(model: LoadedModel, form: str) -> None:
    """Time a step that verifies four guesses, and texts with guesses that are often right.

    Of guesses behind right ones 0.8 are right; or 0.91, so that 0.8 of all guesses are accepted.
    """
    one, five = (verified(model, form, context=512, drafted=count) for count in (0, 4))
    print(f"| 5 tokens, 1 row | {1e3 * five:.3f} ms | {1e3 * one:.3f} ms | {five / one:.2f} |")
    prompt = list(range(5, 37))
    ids, without, _ = spoken(model, form, None, prompt)
    for right in (0.8, 0.91):
        found, speed, last = spoken(model, form, Known(prompt + ids, right), prompt)
        counts = last.statistics
        assert counts is not None
        print(
            f"| {right} right | {counts.accepted_tokens} of {counts.drafted_tokens} accepted "
            f"| {speed:.0f} tokens/s | {without:.0f} tokens/s | {speed / without:.2f} "
            f"| same text: {found == ids} |",
            flush=True,
        )


def ngram(model: LoadedModel, form: str) -> None:
    """Compare greedy texts with those that n-grams draft."""
    guessed(model, form, NgramDraft())


def guessed(model: LoadedModel, form: str, draft: Drafter) -> None:
    """Print tokens per second with and without a draft, of each prompt."""
    for prompt in PROMPTS:
        ids, without, _ = spoken(model, form, None, prompt)
        found, speed, last = spoken(model, form, draft, prompt)
        counts = last.statistics
        assert counts is not None
        print(
            f"| {prompt} | {speed:.0f} tokens/s | {without:.0f} tokens/s | {speed / without:.2f} "
            f"| {counts.accepted_tokens} of {counts.drafted_tokens} right "
            f"| same text: {found == ids} |",
            flush=True,
        )
