"""What a generator does on the device: passes over prompts, and decode steps of its slots.

A decode step is two recordings: forward (ids → logits) for a number of rows, and sampling (logits →
ids) for a number of rows and a `Kind`. Both advance the state of their slots by themselves, so the
host may replay the next step before it has read the ids of the last one.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.sampling import SamplingSettings
from exl2flow.inference.cache.paged import PagedCache, PromptView, Segment, StepView, pages_of
from exl2flow.inference.generate.recording import Recording
from exl2flow.inference.load import LoadedModel
from exl2flow.inference.sampling import (
    Kind,
    Sampled,
    SamplerSlots,
    breakers,
    newline_ids,
    sample,
)
from exl2flow.kernels import on_device
from exl2flow.model import Decoder, RopeTable, check_ids, step_table

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32)  # of a recorded step; beyond them in multiples of the last
_STREAMS = WeakKeyDictionary[Decoder, int]()  # kernels keep sums and counters beside the weights


class Steps:
    """The device side of a generator's slots.

    tables: int32 (slots, pages); lengths: int32 (slots,), tokens whose keys and values are stored;
    ids: int64 (slots, 1), the token after those; logits: fp32 (slots, v), of the last step.
    Idle slots write to the cache's spare page.
    """

    def __init__(
        self, model: LoadedModel, cache: PagedCache, *, slots: int, max_tokens: int
    ) -> None:
        """Take a cache that nothing else changes; `max_tokens` is the longest sequence."""
        self._decoder, self.cache, device = model.decoder, cache, cache.device
        self.check_stream()
        width = model.spec.head.out_features
        shape = (slots, pages_of(max_tokens))
        self.tables = torch.full(shape, cache.spare, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self.ids = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.logits = torch.full((slots, width), -torch.inf, device=device)
        self.draws = torch.zeros(slots, dtype=torch.float64, device=device)
        tokenizer = model.tokenizer
        self.sampler = SamplerSlots(
            slots=slots,
            max_tokens=max_tokens,
            vocab_size=min(tokenizer.vocab_size, model.spec.vocab_size),
            width=width,
            device=device,
        )
        self._tokenizer = tokenizer
        self._angles = step_table(model.spec.rope, max_tokens, device)
        self._records = device.type == "cuda" and isinstance(model.decoder.sublayers, list)
        self._recordings: dict[object, Recording[Any]] = {}

    @property
    def ahead(self) -> bool:
        """Whether the device works while the host reads."""
        return self.cache.device.type == "cuda"

    def check_stream(self) -> None:
        """Raise `ConfigError` unless the stream is the one on which the model is always used."""
        if self.cache.device.type == "cuda":
            stream = torch.cuda.current_stream(self.cache.device).cuda_stream
            if _STREAMS.setdefault(self._decoder, stream) != stream:
                raise ConfigError(
                    "the model is in use on another CUDA stream; make its generators and call them "
                    "on that one, or load the model once more"
                )

    def enter(
        self,
        slot: int,
        pages: Sequence[int],
        ids: Sequence[int],
        settings: SamplingSettings,
        mu: float | None,
    ) -> None:
        """Give a slot to a sequence whose tokens but the last are in the cache."""
        self.set_pages(slot, pages)
        self.sampler.enter(slot, self._completed(settings), ids, mu=mu)
        self.stand_at(slot, ids)

    def _completed(self, settings: SamplingSettings) -> SamplingSettings:
        """Fill in the ids that DRY and XTC leave alone by default."""
        if settings.dry_multiplier and settings.dry_breakers is None:
            settings = replace(settings, dry_breakers=breakers(self._tokenizer))
        if settings.xtc_probability and settings.xtc_ignored is None:
            settings = replace(settings, xtc_ignored=newline_ids(self._tokenizer))
        return settings

    def stand_at(self, slot: int, ids: Sequence[int]) -> None:
        """Set the tokens of a slot's sequence; the last one is read next."""
        self.lengths[slot] = len(ids) - 1
        self.ids[slot] = ids[-1]

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Set the pages of a slot's sequence."""
        self.tables[slot] = self.cache.spare
        there = on_device(torch.tensor(pages, dtype=torch.int32), self.cache.device)
        self.tables[slot, : len(pages)] = there

    def replace(self, slot: int, place: int, token: int) -> None:
        """Put another id in the place of the one that was sampled last.

        Raises:
            SourceModelError: the vocabulary does not have it.
        """
        check_ids([token], self._decoder.spec)
        self.ids[slot] = token
        self.sampler.history[slot, place] = token

    def leave(self, slot: int) -> None:
        """Free a slot."""
        self.tables[slot] = self.cache.spare
        self.lengths[slot] = 0
        self.sampler.leave(slot)

    def move(self, source: int, target: int) -> None:
        """Move a sequence to a free slot."""
        for tensor in (self.tables, self.lengths, self.ids):
            tensor[target] = tensor[source]
        self.sampler.move(source, target)
        self.leave(source)

    def read(
        self,
        ids: Sequence[int],
        segments: Sequence[Segment],
        rows: Sequence[torch.Tensor] = (),
    ) -> None:
        """Store keys and values of the segments' tokens, given one segment after another.

        rows: (hidden,) for each id from `FIRST_EMBEDDING` on, in their order.
        """
        view = PromptView(self.cache, segments)
        table = RopeTable(
            cos=self._angles.cos[view.positions], sin=self._angles.sin[view.positions]
        )
        given = on_device(torch.stack([*rows]), self.cache.device) if rows else None
        there = on_device(torch.tensor([ids]), self.cache.device)
        self._decoder.hidden(there, view, table, given)

    def forward(self, slots: int) -> None:
        """Compute the logits of the next token for each of the first slots."""
        rows = self._rows(slots)
        self._replay(rows, partial(self._forward, rows))

    def sample(self, slots: int, kind: Kind, draws: Sequence[float]) -> Sampled:
        """Sample a token for each of the first slots; the next call overwrites the result."""
        rows = self._rows(slots)
        there = on_device(torch.tensor(draws, dtype=torch.float64), self.cache.device)
        self.draws[:slots] = there
        sampled: Sampled = self._replay((rows, kind), partial(self._sample, rows, kind))
        return sampled

    def warm_up(self, kinds: Sequence[Kind]) -> None:
        """Record what steps of any number of slots need for the kinds."""
        for rows in sorted({self._rows(slots) for slots in range(1, len(self.ids) + 1)}):
            self._recording(rows, partial(self._forward, rows))
            for kind in kinds:
                self._recording((rows, kind), partial(self._sample, rows, kind))

    def _rows(self, slots: int) -> int:
        return min(bucket(slots), len(self.ids))

    def _forward(self, rows: int) -> None:
        lengths = self.lengths[:rows]
        view = StepView(self.cache, self.tables[:rows], lengths)
        logits = self._decoder.forward(self.ids[:rows], view, self._angles.at(lengths))
        self.logits[:rows, : logits.shape[-1]] = logits[:, 0]  # a head may lack some rows
        lengths += self.sampler.active[:rows]

    def _sample(self, rows: int, kind: Kind) -> Sampled:
        sampled = sample(self.logits[:rows], self.sampler, self.draws[:rows], kind)
        self.ids[:rows, 0] = sampled.ids.clamp(min=0)
        return sampled

    def _replay(self, key: object, work: Callable[[], Any]) -> Any:
        recording = self._recording(key, work)
        return work() if recording is None else recording.replay()

    def _recording(self, key: object, work: Callable[[], Any]) -> Recording[Any] | None:
        """Return the recording of some work, made now if it is new; None: nothing is recorded."""
        if self._records and key not in self._recordings:
            beside = next(iter(self._recordings.values()), None)
            try:
                with self._idle():
                    self._recordings[key] = Recording(work, beside=beside)
            except RuntimeError as error:
                log.info("step=launched reason=%s", error)
                self._records = False
        return self._recordings[key] if self._records else None

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Let no slot advance in the block; what it writes to the cache is written again later."""
        active, ids = self.sampler.active.clone(), self.ids.clone()
        self.sampler.active.zero_()
        try:
            yield
        finally:
            self.sampler.active.copy_(active)
            self.ids.copy_(ids)


def bucket(slots: int) -> int:
    """Return the rows of a recording that serves so many slots."""
    if slots > ROWS[-1]:
        return -(-slots // ROWS[-1]) * ROWS[-1]
    return next(rows for rows in ROWS if rows >= slots)
