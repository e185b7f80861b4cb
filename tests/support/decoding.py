"""Sequences in the slots of `DeviceSlots`, and a stand-in for a GPU's recordings."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from exl2flow.engine.adapters import Adapter
from exl2flow.engine.cache.paged import PagedCache, pages_of
from exl2flow.engine.cache.views import Segment
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.engine.sampling import Kind, SampledTokens, SamplingSettings
from exl2flow.kernels import CACHE_FORMATS, PAGE_TOKENS

GREEDY = SamplingSettings.greedy()
LENGTHS = (5, 260, 1, 31, 80)
HOT = SamplingSettings(temperature=2.0, top_k=0, top_p=0.0)
RICH = SamplingSettings(
    temperature=1.5,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    dry_multiplier=0.8,
    xtc_probability=0.3,
    typical=0.95,
)


class Slots:
    """Slots that sequences enter, each with pages of its own in shuffled order.

    sampled: ids of all steps per slot; logits: (v,) of all steps per slot.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: LoadedModel,
        *,
        slots: int,
        name: str = "fp32",
        tokens: int = 300,
        launched: bool = False,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self._each = pages_of(tokens, page_tokens)
        self._draws = torch.Generator().manual_seed(1)
        self.cache = PagedCache(
            model.spec,
            pages=slots * self._each,
            form=CACHE_FORMATS[name],
            device=model.decoder.placement.head,
            layers=model.decoder.placement.layers,
            page_tokens=page_tokens,
        )
        self.steps = DeviceSlots(model, self.cache, slots=slots, max_tokens=tokens)
        if launched:
            self.steps.graphs.records = False
        self.settings: dict[int, SamplingSettings] = {}
        self.pages: dict[int, list[int]] = {}
        self.sampled: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}
        self._free = torch.randperm(slots * self._each).tolist()

    @torch.inference_mode()
    def enter(
        self,
        slot: int,
        ids: Sequence[int],
        settings: SamplingSettings = GREEDY,
        *,
        cut: int = 0,
        adapters: tuple[Adapter, ...] = (),
    ) -> None:
        """Read a prompt, in two parts if it is cut, and give it the slot."""
        if slot in self.pages:
            self.leave(slot)
        pages = [self._free.pop() for _ in range(self._each)]
        last = len(ids) - 1
        for begin, end in ((0, cut), (cut, last)):
            if begin < end:
                segment = Segment(pages=pages, begin=begin, end=end)
                self.steps.read(ids[begin:end], [segment], adapters=[adapters])
        self.steps.enter(slot, pages, ids, settings, None, adapters)
        self.settings[slot], self.pages[slot] = settings, pages
        self.sampled[slot], self.logits[slot] = [], []

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        """Free a slot and its pages."""
        self.steps.leave(slot)
        self._free += self.pages.pop(slot)
        del self.settings[slot]

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Move a sequence to a free slot."""
        self.steps.move(source, target)
        for kept in (self.settings, self.pages, self.sampled, self.logits):
            kept[target] = kept.pop(source)

    @torch.inference_mode()
    def run(
        self, steps: int = 1, *, draws: Sequence[float] | None = None, **kind: Any
    ) -> SampledTokens:
        """Run steps, and return what the last one sampled.

        Draws depend on the number of the step only, so that texts do not depend on slots.
        """
        count = max(self.settings) + 1
        for _ in range(steps):
            number = float(torch.rand((), generator=self._draws, dtype=torch.float64))
            chosen = Kind.of(self.settings.values(), **kind)
            self.steps.forward(count)
            self.steps.positions.prepare([draws or [number] * count])
            found = self.steps.sample(count, chosen)
            for slot in self.settings:
                self.sampled[slot].append(int(found.ids[slot]))
                self.logits[slot].append(self.steps.logits[slot].clone())
        return found


def prompts_of(model: LoadedModel) -> list[list[int]]:
    """Return random prompts of `LENGTHS`."""
    return [torch.randint(2, model.spec.vocab_size, (count,)).tolist() for count in LENGTHS]


def text_alone(model: LoadedModel, ids: list[int], settings: SamplingSettings, count: int) -> Slots:
    """Return the only slot after so many steps."""
    alone = Slots(model, slots=1)
    alone.enter(0, ids, settings)
    alone.run(count)
    return alone


class Again:
    """Stands in for a GPU recording: a replay runs the work again."""

    made: list["Again"]

    def __init__(self, work: Callable[[], Any], beside: "Again | None" = None) -> None:
        self.beside = beside
        self._work = work
        for _ in range(3):
            work()
        Again.made.append(self)

    def replay(self) -> Any:
        return self._work()
