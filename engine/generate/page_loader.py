"""`PageLoader`: enters pages from host memory and disk into the cache, instead of reading a prompt.

A sequence waits while threads read its pages. Each step enters the pages that have been read.
"""

from collections import deque
from collections.abc import Sequence as Items
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from exl2flow.engine.cache.page_pool import PagePool
from exl2flow.engine.cache.prefix_tree import FullPage, SequencePages
from exl2flow.engine.cache.tiers import Tiers
from exl2flow.engine.generate.job import Job, Sequence
from exl2flow.engine.generate.scheduler import Scheduler

STEP_PAGES = 32  # that enter the cache in a step
PATIENCE_SECONDS = 0.002  # for files in a step that has nothing else to do


@dataclass(slots=True, eq=False)
class _Load:
    """Pages of a sequence, in order: which are read, and which come later."""

    reading: deque[tuple[FullPage, str, Future[torch.Tensor | None]]] = field(
        default_factory=deque
    )  # with the tier
    later: deque[FullPage] = field(default_factory=deque)

    def has(self, page: FullPage) -> bool:
        return page in self.later or any(one == page for one, _, _ in self.reading)

    def drop(self) -> None:
        for _, _, result in self.reading:
            result.cancel()
        self.reading.clear()
        self.later.clear()


class PageLoader:
    """Loads the pages of sequences from `tiers`."""

    def __init__(self, tiers: Tiers, scheduler: Scheduler) -> None:
        self._tiers, self._scheduler, self._room = tiers, scheduler, STEP_PAGES
        self._loads = WeakKeyDictionary[SequencePages, _Load]()

    def begin_step(self) -> None:
        """Let further pages enter."""
        self._room = STEP_PAGES

    def waits(self, job: Job, sequence: Sequence) -> bool:
        """Enter pages of a sequence; True: more come, or its job was preempted for them."""
        held, pool = sequence.held, self._scheduler.page_pool
        if (load := self._loads.get(held)) is not None and not load.reading:
            return False
        if not pool.share(held, sequence.reusable):
            return False
        if load is None:
            following = pool.following(held, sequence.reusable)
            if (first := next(following, None)) is not None and self._is_loading(first):
                return True  # another sequence enters it
            found = self._tiers.find(pool.following(held, sequence.reusable))
            load = self._loads[held] = _Load(later=deque(found))
        self._read_ahead(load)
        if load.reading and not any(one.is_decoding for one in self._scheduler.running):
            wait([load.reading[0][-1]], PATIENCE_SECONDS)
        is_running = self._enter(job, sequence, load)
        return not is_running or bool(load.reading)

    def _is_loading(self, page: FullPage) -> bool:
        loads = [load for held, load in self._loads.items() if not held.released]
        return any(load.has(page) for load in loads)

    def _read_ahead(self, load: _Load) -> None:
        while load.later and len(load.reading) < self._tiers.ahead:
            page = load.later.popleft()
            load.reading.append((page, *self._tiers.read(page)))

    def _enter(self, job: Job, sequence: Sequence, load: _Load) -> bool:
        """Enter the pages that are there, in order; False: the job was preempted for them."""
        held, pool = sequence.held, self._scheduler.page_pool
        while load.reading and load.reading[0][-1].done() and self._room:
            page, tier, result = load.reading.popleft()
            expected = next(pool.following(held, sequence.reusable), None)
            if expected != page:
                continue  # another sequence has entered it meanwhile
            if result.cancelled() or (data := result.result()) is None:
                load.drop()
                break
            if not self._scheduler.reserve(job, sequence, held.filled + pool.page_tokens):
                load.drop()
                return False
            if not self._tiers.load(held.pages[-1], data):
                load.drop()
                break
            self._fill(pool, held, sequence.ids)
            held.loaded[tier] += pool.page_tokens
            self._room -= 1
            self._read_ahead(load)
        return True

    def _fill(self, pool: PagePool, held: SequencePages, ids: Items[int]) -> None:
        pool.fill(held, ids[held.filled : held.filled + pool.page_tokens])
        held.cached += pool.page_tokens
        held.cached_pages += 1
