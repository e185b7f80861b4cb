"""Scheduler: admits jobs to slots, reserves their pages, and preempts jobs if none is left.

Pages are taken when they are written. When none is left, the youngest job goes back to the front of
the queue with its tokens; its pages stay cached, so it soon continues where it was.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

import torch

from exl2flow.core.errors import InferenceError
from exl2flow.engine.cache.page_pool import PagePool
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.event import Event
from exl2flow.engine.generate.failures import as_text_error
from exl2flow.engine.generate.job import FREE, Job, Sequence
from exl2flow.engine.generate.sequence_states import SequenceStates
from exl2flow.kernels.cuda.graphs import bucket

LOOK_AHEAD = 32  # waiting jobs that are tried after one that does not fit


class Scheduler:
    """The queue, the slots and the pages of a generator.

    running: jobs with slots, the oldest first. catch_up: reads what was launched, which may end
    jobs; set by who launches, weakly, so that the memory of a dropped generator is free at once.
    """

    def __init__(
        self,
        device_slots: DeviceSlots,
        page_pool: PagePool,
        states: SequenceStates,
        *,
        slots: int,
    ) -> None:
        self.page_pool, self.states, self.running = page_pool, states, list[Job]()
        self.catch_up: Callable[[], Callable[[], None] | None] = lambda: None
        self._device_slots = device_slots
        self._waiting = deque[Job]()
        self._free = list(range(slots))
        self.preemptions = 0

    @property
    def top(self) -> int:
        """One more than the highest slot whose sequence is decoded."""
        return 1 + max(s.slot for job in self.running if job.is_decoding for s in job.sequences)

    def add(self, job: Job) -> None:
        """Put a job at the end of the queue; any thread may do so."""
        self._waiting.append(job)

    def admit(self) -> None:
        """Start waiting jobs that fit, in order; one that does not is overtaken a few times."""
        skipped: list[Job] = []
        while (
            self._waiting
            and self._free
            and len(skipped) < LOOK_AHEAD
            and all(job.may_be_overtaken for job in skipped)
        ):
            job = self._waiting.popleft()
            if job.is_done:
                continue
            if not self._fits(job):
                skipped.append(job)
                continue
            for other in skipped:
                other.skips += 1
            for sequence in job.sequences:
                sequence.slot = heappop(self._free)
            self.running.append(job)
            job.started()
        self._waiting.extendleft(reversed(skipped))

    def _fits(self, job: Job) -> bool:
        if len(job.sequences) > len(self._free):
            return False
        needed = sum(self.page_pool.needs(s.held, s.ids, s.reusable) for s in job.sequences)
        # every running job may need another page soon
        return not self.running or needed + len(self.running) <= self.page_pool.free

    def begin_steps(self, job: Job) -> None:
        """Let a job take part in decode steps once all of its sequences are read.

        The scores of its prompt are delivered before; a job that wanted nothing else ends.
        """
        if job.is_decoding or any(s.unread for s in job.sequences):
            return
        self._deliver_scores(job)
        if job.is_done:
            return
        if not job.output.max_new_tokens:
            self.end(job, job.output.finish("max_new_tokens"))
            return
        try:
            self._enter(job)
        except torch.OutOfMemoryError as error:
            job.is_decoding = False
            self.end(job, job.output.finish("error", error=as_text_error(error)))

    def _enter(self, job: Job) -> None:
        """Give a job's slots what steps need; memory for that is taken here, not in a step."""
        job.is_decoding, job.slot_mask = True, FREE
        for s in job.sequences:
            self._device_slots.enter(
                s.slot, s.held.pages, s.ids, job.request.settings, job.mu, job.adapters
            )
        if len(job.sequences) == 2:
            self._device_slots.sampler.pair(*(s.slot for s in job.sequences))

    def _deliver_scores(self, job: Job) -> None:
        """Deliver the scores of a prompt that has been read, once; end the job if it has none."""
        scorer = job.lead.scorer
        if scorer is None or scorer.is_delivered:
            return
        self._device_slots.finish_copies()
        scorer.is_delivered, scores = True, scorer.scores()
        if scores is None:
            error = InferenceError("the logits are not finite; check the files of the model")
            self.end(job, job.output.finish("error", error=error), keep=False)
            return
        total = sum(len(s.ids) - 1 for s in job.sequences)
        tag = job.request.tag
        job.deliver(Event(stage="prompt", tag=tag, read=total, total=total, scores=scores))

    def reserve_pages(self) -> None:
        """Take the pages that the next step writes; preempt jobs if there are too few."""
        for job in [*self.running]:
            while job.is_decoding and job in self.running and not self._has_next(job):
                self.preempt(self.running[-1])

    def _has_next(self, job: Job) -> bool:
        for s in job.sequences:
            tokens = len(s.ids) + job.launched
            if tokens > len(s.held.pages) * self.page_pool.page_tokens and job.wants_more:
                if not self.page_pool.reserve(s.held, tokens):
                    return False
                self._device_slots.set_pages(s.slot, s.held.pages)
        return True

    def reserve_ahead(self, job: Job, tokens: int) -> int:
        """Take pages for draft tokens; return how many of them have room."""
        for s in job.sequences:
            begin = len(s.ids) + job.launched
            end = begin + tokens
            is_missing = end > len(s.held.pages) * self.page_pool.page_tokens
            if is_missing and self.page_pool.reserve(s.held, end):
                self._device_slots.set_pages(s.slot, s.held.pages)
            tokens = min(tokens, len(s.held.pages) * self.page_pool.page_tokens - begin)
        return tokens

    def reserve(self, job: Job, sequence: Sequence, tokens: int) -> bool:
        """Take pages for a prompt; preempt younger jobs if need be. False: it was preempted."""
        while not self.page_pool.reserve(sequence.held, tokens):
            self.preempt(self.running[-1])
            if job not in self.running:
                return False
        return True

    def advance(self, job: Job) -> None:
        """Let the job's sequences follow its output, which a token or a rewind has changed."""
        generated, lacks_keys = job.output.ids, False
        for s, prompt in zip(job.sequences, job.prompt.sequences, strict=True):
            count = len(prompt) + len(generated)
            if count > len(s.ids):
                s.ids.append(generated[-1])
                if s.held.filled + self.page_pool.page_tokens < len(s.ids):
                    self._settle(s)
                self.states.has_grown(s.slot, s.held, is_holding=job.output.may_rewind)
            else:  # also if only the newest is cut, which `s.ids` lacks
                self._rewind(s, count)
                lacks_keys |= s.unread > 0  # no page was free for a copy, or the state went back
        if lacks_keys:
            job.is_decoding = False
            for s in job.sequences:
                self._go_back(s)
                self._device_slots.leave(s.slot)

    def _settle(self, sequence: Sequence) -> None:
        """Record decoded tokens in the page pool."""
        held = sequence.held
        if self.page_pool.fill(held, sequence.ids[held.filled : -1]) and sequence.slot >= 0:
            self._device_slots.set_pages(sequence.slot, held.pages)

    def _rewind(self, sequence: Sequence, count: int) -> None:
        self._settle(sequence)
        del sequence.ids[count:]
        held = sequence.held
        self._device_slots.copy(self.page_pool.cut(held, min(count - 1, held.filled)))
        if sequence.unread or held.behind > held.filled:
            self._go_back(sequence)
        self._device_slots.set_pages(sequence.slot, held.pages)
        self._device_slots.stand_at(sequence.slot, sequence.ids)
        self._device_slots.sampler.cut(sequence.slot, count)

    def _go_back(self, sequence: Sequence) -> None:
        """Cut a sequence that is read on to the last place where its state is."""
        held = sequence.held
        while (place := self.states.place(held, held.filled)) != held.filled:
            self._device_slots.copy(self.page_pool.cut(held, place))
        self.states.go_back(sequence.slot, held)

    def lose_state(self, sequence: Sequence) -> bool:
        """Cut a sequence to a place with a known state after a pass failed; False: it has none."""
        if not self.states.lose(sequence.held):
            return False
        self._go_back(sequence)
        return True

    def preempt(self, job: Job) -> None:
        """Put a running job at the front of the queue, unless it ends by itself."""
        if job.launched:
            if (catch_up := self.catch_up()) is not None:
                catch_up()
            if job not in self.running:
                return
        if job.is_decoding and job.request.settings.mirostat:
            job.mu = float(self._device_slots.sampler.mu[job.lead.slot])
        self._leave(job, keep=True)
        self.preemptions += 1
        for s in job.sequences:
            s.held = job.new_pages()
        self._waiting.appendleft(job)

    def end(self, job: Job, last: Event, *, keep: bool = True) -> None:
        """Free slots and pages, deliver the last event; `keep=False` forgets the pages' content."""
        if job in self.running:
            self._leave(job, keep=keep)
        job.is_done = True
        job.deliver(replace(last, statistics=job.statistics()))

    def _leave(self, job: Job, *, keep: bool) -> None:
        for s in job.sequences:
            if job.is_decoding and keep:
                self._settle(s)
                self.states.leave(s.slot, s.held)
            self._device_slots.leave(s.slot)
        self._release(job, keep=keep)  # last: the device may fail, and the job is still known then

    def _release(self, job: Job, *, keep: bool) -> None:
        """Free the slots and pages of a running job on the host."""
        self.running.remove(job)
        for s in job.sequences:
            if not keep:
                self.states.forget(s.held)
            self.page_pool.release(s.held, keep=keep)
            heappush(self._free, s.slot)
            s.slot = -1
        job.is_decoding = False

    def close_gaps(self) -> None:
        """Move sequences to lower slots, if no job waits and a smaller batch then serves."""
        if self._waiting or not any(job.is_decoding for job in self.running):
            return
        running = (s for job in self.running for s in job.sequences)
        sequences = sorted(running, key=lambda s: s.slot)
        count = len(sequences)
        if bucket(count) == bucket(1 + sequences[-1].slot):
            return
        for target, s in enumerate(sequences):
            if target != s.slot:
                self._device_slots.move(s.slot, target)
                s.slot = target
        self._free = [*range(count, len(self._free) + count)]  # in order: a heap

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self.all()

    def all(self) -> list[Job]:
        """Return all jobs that have not ended; other threads may add more meanwhile."""
        return [*self.running, *(job for job in self._waiting.copy() if not job.is_done)]

    def abandon(self) -> list[Job]:
        """Take out and return all jobs that have not ended, without the device, which failed."""
        jobs = self.all()
        self._waiting.clear()
        for job in [*self.running]:
            self._release(job, keep=True)
        return jobs
