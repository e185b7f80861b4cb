"""Decode: launch a step for all running jobs, read its tokens one step later."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from weakref import WeakMethod

import torch

from exl2flow.core.errors import InferenceError
from exl2flow.core.requests.request import Request, Sampled
from exl2flow.inference.drafts import DraftRequest
from exl2flow.inference.filters import prepare
from exl2flow.inference.generate.device_slots import DeviceSlots
from exl2flow.inference.generate.draft_positions import restored
from exl2flow.inference.generate.event import Token
from exl2flow.inference.generate.job import FREE, Job
from exl2flow.inference.generate.pending_result import PendingResult
from exl2flow.inference.generate.scheduler import Scheduler
from exl2flow.inference.generate.step_job import StepJob, TokenMask
from exl2flow.inference.sampling import Kind
from exl2flow.inference.sampling.bits import ids_of

CANDIDATES = 64  # that a hook sees


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device works on: its jobs, and what arrives for each place of a draft.

    mu: Mirostat's bounds before it, fp64 (slots,), which a discarded sample must not change; None
    if no job has any.
    """

    parts: list[StepJob]
    arrivals: list[PendingResult]
    mu: torch.Tensor | None


class Decode:
    """Samples tokens for each job whose prompt is read, and hands them to the job's output."""

    def __init__(self, steps: DeviceSlots, schedule: Scheduler) -> None:
        self._steps, self._scheduler = steps, schedule
        self._launched: _Launched | None = None
        schedule.catch_up = WeakMethod(self.catch_up)

    def step(self) -> None:
        """Launch the next step for all that need not wait for the last one, then read that."""
        if self._launched is not None and self._must_wait(self._launched.parts):
            self.catch_up()
        self._scheduler.reserve_pages()
        parts, slots = self._forward()
        if any(part.job.constraint is not None for part in parts):
            self.catch_up()  # what a constraint allows follows from the last token
        launched = self._sample(parts, slots)
        self.catch_up()
        self._launched = launched
        if not self._steps.ahead or any(part.job.is_stepwise for part in parts):
            self.catch_up()

    def _must_wait(self, parts: list[StepJob]) -> bool:
        """Return whether the next forward pass depends on the tokens of these."""
        waits = (part.job.output.waits or part.job.is_stale for part in parts)
        return self._steps.proposer is not None or any(waits)

    def _forward(self) -> tuple[list[StepJob], int]:
        """Launch the next forward pass; return the jobs that sample from it, and its slots."""
        self._scheduler.close_gaps()
        jobs = [job for job in self._scheduler.running if job.steps and job.wants_more]
        slots = self._scheduler.top if jobs else 0
        parts = [StepJob(job, draft) for job, draft in self._drafted(jobs, slots)]
        if parts:
            drafts = {slot: part.draft for part in parts for slot in part.slots}
            self._steps.forward(slots, drafts)
        for job in jobs:
            job.launched += 1
        return parts, slots

    def _drafted(self, jobs: Sequence[Job], slots: int) -> Iterator[tuple[Job, list[int]]]:
        """Yield the jobs with draft tokens."""
        if self._steps.proposer is None or not jobs:
            yield from ((job, []) for job in jobs)
            return
        room = self._steps.room(slots)
        wanted = {
            s.slot: DraftRequest(s, s.ids, job.most_drafted(room) if s is job.lead else 0)
            for job in jobs
            for s in job.sequences
        }
        found, known = self._steps.proposer.propose(wanted), range(self._steps.sampler.vocab_size)
        for job in jobs:
            draft = [*takewhile(known.__contains__, found[job.lead.slot])]
            yield job, draft[: self._scheduler.reserve_ahead(job, len(draft))]

    def _sample(self, parts: list[StepJob], slots: int) -> _Launched | None:
        """Launch the samples of a forward pass: first all first places, then those behind them."""
        constraints = [part.job.constraint for part in parts]
        prepare(one for c in constraints if c is not None for one in c.parts)
        parts = [part for part in parts if self._plan(part)]
        if not parts:
            return None
        kind, arrivals = self._kind(parts), list[PendingResult]()
        count, mu = max(len(part.places) for part in parts), None
        if any(part.job.request.settings.mirostat for part in parts):
            mu = self._steps.sampler.mu.clone()
        with restored(self._steps.sampler.active) if count > 1 else nullcontext():
            self._prepare(parts, slots, count)
            for place in range(count):
                there = [part for part in parts if place < len(part.places)]
                for part in there:
                    self._show(part, part.places[place])
                sampled = self._steps.sample(slots, kind, behind=place > 0)
                requests = ((part.slot, part.job.request) for part in there)
                rows = [slot for slot, request in requests if request.logits or request.hooks]
                arrivals.append(PendingResult(sampled, self._steps.logits, rows))
        return _Launched(parts, arrivals, mu)

    def _prepare(self, parts: list[StepJob], slots: int, places: int) -> None:
        """Tell the device the draws of all places, and what was drafted."""
        draws = [[0.0] * slots for _ in range(places)]
        drafted = [[-1] * slots for _ in range(places - 1)]
        for part in parts:
            for place in range(len(part.places)):
                draws[place][part.slot] = part.job.draw(place)
                for slot in part.slots if place else ():
                    drafted[place - 1][slot] = part.draft[place - 1]
        self._steps.places.prepare(draws, drafted)

    def _plan(self, part: StepJob) -> bool:
        """Find what each place may take; False: the job has ended."""
        if part.job.is_done:
            return False
        try:
            part.plan()
        except Exception as error:  # of a filter
            event = part.job.output.finish("error", error=error)
        else:
            if not part.places[0].must_end:
                return True
            event = part.job.output.finish("end_filter")
        self._scheduler.end(part.job, event)
        return False

    def _kind(self, parts: list[StepJob]) -> Kind:
        """Return the operations that serve all jobs that are decoded."""
        jobs = [job for job in self._scheduler.running if job.steps]
        has_mask = any(place != TokenMask() for part in parts for place in part.places)
        every = [job.request.settings for job in jobs]
        return Kind.of(
            {id(each): each for each in every}.values(),  # a hash reads all of a long bias
            masked=has_mask or any(job.shown != FREE for job in jobs),
            top=max(_top(job.request) for job in jobs),
            probabilities=any(job.request.probabilities or job.request.hooks for job in jobs),
        )

    def _show(self, part: StepJob, place: TokenMask) -> None:
        """Set what the next sample of a job may take."""
        if place.allowed is not None or place.mask != part.job.shown:
            part.job.shown = place.mask
            self._steps.sampler.allow(part.slot, place.words(self._steps.sampler.width))

    def catch_up(self) -> None:
        """Read what the last step sampled."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        for arrival in launched.arrivals:
            arrival.wait()
        for part in launched.parts:
            if not part.job.is_done:
                part.job.launched -= 1
                self._read(part, launched)

    def _read(self, part: StepJob, launched: _Launched) -> None:
        """Hand the tokens of a step to a job, up to the first one that was not drafted."""
        job, top = part.job, _top(part.job.request)
        if job.is_stale:
            job.is_stale = False
            if launched.mu is not None:
                self._steps.sampler.mu[part.slot].copy_(launched.mu[part.slot])
            self._scheduler.advance(job)  # goes back to the last token that was read
            return
        arrivals = launched.arrivals[: len(part.places)]
        tokens = [arrival.token(part.slot, top) for arrival in arrivals]
        pairs = zip(tokens, part.draft, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0].id == pair[1], pairs))
        job.reach.note(len(part.draft), right)
        for token, place in zip(tokens[: right + 1], part.places, strict=False):
            before = len(job.output.ids)
            job.draws.popleft()
            if token.id < 0:
                self._end_without_token(job, place)
                break
            try:
                self._take(job, token, place.ends)
            except Exception as error:  # of a hook
                self._scheduler.end(job, job.output.finish("error", error=error))
            if job.is_done or len(job.output.ids) <= before:
                break

    def _end_without_token(self, job: Job, place: TokenMask) -> None:
        """End a job that nothing was sampled for: it excludes all ids, or its logits are broken."""
        sampler = self._steps.sampler
        message = "the logits are not finite; check the files of the model"
        words, known = place.words(sampler.width), {*range(sampler.vocab_size)}
        left = known if words is None else known.intersection(ids_of(words))
        left = left.difference(i for i, bias in job.request.settings.token_bias if bias == -inf)
        if not left:
            message = (
                "no token is left to sample: `excluded`, `token_bias`, bans, and stops before "
                "`min_new_tokens` rule out all of them; allow more"
            )
        event = job.output.finish("error", error=InferenceError(message))
        self._scheduler.end(job, event, keep=not left)  # others may not read broken values

    def _take(self, job: Job, token: Token, ends: frozenset[int]) -> None:
        job.sampled()
        if job.request.hooks:
            token = self._hooked(job, token)
        event = job.output.push(token)
        if event is not None and event.reason is not None:
            self._scheduler.end(job, event)
            return
        if event is not None:
            job.deliver(event)
        if job.follows(token, len(event.suppressed_ids) if event is not None else 0, ends):
            self._scheduler.advance(job)
        else:
            self._scheduler.end(job, job.output.finish("end_filter"))

    def _hooked(self, job: Job, token: Token) -> Token:
        """Let the hooks see a token and replace it."""
        seen = Sampled(
            sampled_token=token.id,
            sampled_prob=token.probability or 0.0,
            candidate_tokens=token.top_ids,
            candidate_probs=token.top_probabilities,
            logits=token.logits,
        )
        for hook in job.request.hooks:
            hook(seen)
        token = token._replace(fed=seen.feed_filters)
        if seen.sampled_token == token.id:
            return token
        for s in job.sequences:
            self._steps.replace(s.slot, len(s.ids), seen.sampled_token)
        return token._replace(id=seen.sampled_token, probability=None)


def _top(request: Request) -> int:
    """Return the number of top-k tokens that the request or its hooks need."""
    return max(request.top_tokens, CANDIDATES if request.hooks else 0)
