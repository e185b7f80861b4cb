"""A batch of sequences with a cache of its own, to time prompts and decode steps."""

import torch

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.cache.page_pool import Copy
from exl2flow.engine.cache.paged import cache_format, pages_of, reserve
from exl2flow.engine.cache.views import Segment, StepView
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.loading.load import LoadedModel
from exl2flow.engine.sampling import Kind
from exl2flow.model import RopeTables
from exl2flow.model.memory.footprint import PROMPT_TOKENS


class DecodeBatch:
    """Random sequences of `context` tokens, of which a decode step reads the next one.

    Sequences have pages of their own, as texts that have nothing in common.
    """

    def __init__(self, model: LoadedModel, *, size: int, context: int, cache: str) -> None:
        """Reserve a cache of the format `cache`.

        Raises:
            ConfigError: no such format.
            OutOfDeviceMemory: the cache does not fit.
        """
        placement, pages = model.decoder.placement, pages_of(context + 1)
        form = cache_format(cache, placement.head)
        self.size, self.context, self.model = size, context, model
        self.cache = reserve(
            model.spec, pages=size * pages, form=form, placement=placement, slots=size
        )
        self.device_slots = DeviceSlots(model, self.cache, slots=size, max_tokens=context + 1)
        self._ids = torch.randint(0, model.spec.vocab_size, (size, context + 1)).tolist()
        self._pages = torch.arange(size * pages).view(size, pages).tolist()
        self._angles = RopeTables.of(model.spec, context + 1, placement.head)
        self._kind = Kind.of([SamplingSettings.greedy()])

    def read(self, count: int | None = None) -> None:
        """Read the prompts of the first sequences, of all by default."""
        parts = [
            (index, Segment(pages=self._pages[index], begin=begin, end=end, slot=index))
            for index in range(self.size if count is None else count)
            for begin in range(0, self.context, PROMPT_TOKENS)
            for end in (min(begin + PROMPT_TOKENS, self.context),)
        ]
        together = max(1, PROMPT_TOKENS // self.context)
        for first in range(0, len(parts), together):
            chosen = parts[first : first + together]
            tokens = [token for index, s in chosen for token in self._ids[index][s.begin : s.end]]
            self.device_slots.read(tokens, [segment for _, segment in chosen])

    def fill(self) -> None:
        """Read the first prompt, and copy its keys, values and states to the other sequences."""
        self.read(1)
        first, *others = self._pages
        for source, target in (pair for pages in others for pair in zip(first, pages, strict=True)):
            self.device_slots.copy(Copy(source, target, self.cache.page_tokens))
        if self.cache.states is not None:
            for slot in range(1, self.size):
                self.cache.states.move(0, slot)

    def enter(self, settings: SamplingSettings) -> None:
        """Set all sequences to the end of their prompts, to continue with these settings."""
        self._kind = Kind.of([settings])
        for slot in range(self.size):
            self.device_slots.enter(slot, self._pages[slot], self._ids[slot], settings, None)

    def launch(self) -> None:
        """Compute the logits of the next tokens without CUDA graphs."""
        view = StepView(self.cache, self.device_slots.tables, self.device_slots.lengths)
        self.model.decoder.forward(self.device_slots.ids, view, self._angles.at(view.positions))

    def step(self) -> None:
        """Decode a token for each sequence as a generator does, then undo the advance."""
        self.device_slots.forward(self.size)
        self.device_slots.positions.prepare([[0.5] * self.size])
        self.device_slots.sample(self.size, self._kind)
        self.device_slots.lengths -= 1
        self.device_slots.sampler.counts -= 1
        if self.cache.states is not None:
            self.cache.states.lag()

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        layers = zip(self.model.spec.attending, self.cache.stores, strict=True)
        positions = (self.cache.pages + 1) * self.cache.page_tokens
        return self.size * sum(
            store.nbytes
            // positions
            * min(self.context + 1, layer.rule.window or layer.rule.chunk or self.context + 1)
            for layer, store in layers
        )
