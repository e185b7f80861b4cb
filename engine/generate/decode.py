"""Decode: launch a step for all running jobs, read its tokens one step later."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from weakref import WeakMethod

import torch

from exl2flow.core.errors import InferenceError, TextStuck
from exl2flow.core.requests.request import Request, Sampled
from exl2flow.engine.drafts import ON_DEVICE, DraftKind
from exl2flow.engine.filters import prepare
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.draft_positions import restored
from exl2flow.engine.generate.drafting import Drafting
from exl2flow.engine.generate.event import Token
from exl2flow.engine.generate.failures import ENDS_PROGRAM, as_text_error
from exl2flow.engine.generate.job import FREE, Job
from exl2flow.engine.generate.pending_result import PendingResult
from exl2flow.engine.generate.scheduler import Scheduler
from exl2flow.engine.generate.step_job import UNCONSTRAINED, StepJob, TokenMask
from exl2flow.engine.sampling import (
    Kind,
    OwnProbabilities,
    SampledTokens,
    own_probabilities,
)
from exl2flow.engine.sampling.bits import ids_of

CANDIDATES = 64  # that a hook sees


@dataclass(slots=True)
class _Launched:
    """A step that the device works on: its jobs, and a result for each draft position.

    mu: Mirostat's bounds before it, fp64 (slots,), which a discarded sample must not change; None
    if no job has any. drafted: int64 (slots, drafts) on the host once it has ended; None if the
    host knows them. slots: that it took; work: see `DeviceSlots.work`. is_counted: whether it is
    known how many tokens it brought.
    """

    step_jobs: list[StepJob]
    results: list[PendingResult]
    mu: torch.Tensor | None
    drafted: torch.Tensor | None
    slots: int
    work: int
    is_counted: bool = False

    @property
    def has_drafts(self) -> bool:
        return any(one.draft for one in self.step_jobs)

    @property
    def own_drafts(self) -> int:
        """The most draft tokens of a text by the model's own block."""
        own = (len(one.draft) for one in self.step_jobs if one.kind is DraftKind.MTP)
        return max(own, default=0)


class Decode:
    """Runs decode steps: samples tokens for each job whose prompt is read, and outputs them."""

    def __init__(self, device_slots: DeviceSlots, scheduler: Scheduler) -> None:
        self._device_slots, self._scheduler = device_slots, scheduler
        self._launched: _Launched | None = None
        self._drafting = Drafting(device_slots, scheduler)
        scheduler.catch_up = WeakMethod(self.catch_up)

    def step(self) -> None:
        """Launch the next step of jobs that need not wait for the last one, then read that."""
        proposer = self._device_slots.proposer
        if self._launched is not None and self._launched.has_drafts:
            self._count(self._launched)
        jobs, slots = self._decoding()
        is_drafting = self._drafting.is_wanted(jobs, slots)
        if self._must_wait() or (is_drafting and proposer is not None and proposer.reads_ids):
            self.catch_up()
        self._scheduler.reserve_pages()
        step_jobs, slots = self._forward(is_drafting=is_drafting)
        if any(step_job.job.constraint is not None for step_job in step_jobs):
            self.catch_up()  # what a constraint allows follows from the last token
        launched = self._sample(step_jobs, slots)
        is_stepwise = any(step_job.job.is_stepwise for step_job in step_jobs)
        is_late = self._device_slots.is_asynchronous and not is_stepwise
        if is_late and launched is not None and launched.own_drafts:
            self._device_slots.draft_ahead(slots, launched.own_drafts)
        self.catch_up()
        self._launched = launched
        if not is_late:
            self.catch_up()

    def _must_wait(self) -> bool:
        """Return whether the next forward pass depends on tokens that were not read yet."""
        step_jobs = [] if self._launched is None else self._launched.step_jobs
        return any(one.is_last or one.job.output.waits or one.job.is_stale for one in step_jobs)

    def _decoding(self) -> tuple[list[Job], int]:
        """Return the jobs that sample next, and the slots of a step of them."""
        jobs = [job for job in self._scheduler.running if job.is_decoding and job.wants_more]
        return jobs, self._scheduler.top if jobs else 0

    def _forward(self, *, is_drafting: bool) -> tuple[list[StepJob], int]:
        """Launch the next forward pass; return the jobs that sample from it, and its slots."""
        self._scheduler.close_gaps()
        jobs, slots = self._decoding()
        step_jobs = self._drafting.step_jobs(jobs, slots, is_drafting=is_drafting)
        if step_jobs:
            drafts = {slot: one.draft for one in step_jobs for slot in one.slots}
            self._device_slots.forward(slots, drafts)
        for job in jobs:
            for s in job.sequences:
                s.held.behind = len(s.ids) - 1 + job.launched
            job.launched += 1
        return step_jobs, slots

    def _sample(self, step_jobs: list[StepJob], slots: int) -> _Launched | None:
        """Launch the samples of a forward pass, one draft position of all jobs after the other."""
        constraints = [one.job.constraint for one in step_jobs]
        prepare(part for c in constraints if c is not None for part in c.parts)
        step_jobs = [one for one in step_jobs if self._plan(one)]
        if not step_jobs:
            return None
        kind, results = self._kind(step_jobs), list[PendingResult]()
        count, mu, drafted = max(len(one.masks) for one in step_jobs), None, None
        if any(ON_DEVICE in one.draft[:1] for one in step_jobs):  # there with the first result
            drafted = self._device_slots.ids[:, 1:count].to("cpu", non_blocking=True, copy=True)
        if any(one.job.request.settings.mirostat for one in step_jobs):
            mu = self._device_slots.sampler.mu.clone()
        with restored(self._device_slots.sampler.active) if count > 1 else nullcontext():
            self._prepare(step_jobs, slots, count)
            for position in range(count):
                sampling = [one for one in step_jobs if position < len(one.masks)]
                self._restrict(sampling, position)
                sampled = self._device_slots.sample(slots, kind, after_draft=position > 0)
                requests = [(one.slot, one.job.request) for one in sampling]
                copied = [slot for slot, request in requests if request.logits or request.hooks]
                own = self._own(requests, sampled)
                results.append(PendingResult(sampled, self._device_slots.logits, copied, own))
        return _Launched(step_jobs, results, mu, drafted, slots, self._device_slots.work)

    def _own(
        self, requests: Sequence[tuple[int, Request]], sampled: SampledTokens
    ) -> tuple[Sequence[int], OwnProbabilities] | None:
        """Compute the model's own probabilities for the slots whose requests want them."""
        tops = {slot: request.top_tokens for slot, request in requests if _wants_own(request)}
        if not tops:
            return None
        return [*tops], self._device_slots.own([*tops], sampled, max(tops.values()))

    def _prepare(self, step_jobs: list[StepJob], slots: int, count: int) -> None:
        """Copy the draws of all draft positions, and the draft tokens, to the device."""
        draws, counts = [[0.0] * slots for _ in range(count)], [0] * slots
        for one in step_jobs:
            for position in range(len(one.masks)):
                draws[position][one.slot] = one.job.draw(position)
            for slot in one.slots:
                counts[slot] = len(one.masks) - 1
        self._device_slots.positions.prepare(draws)
        if count > 1:
            self._device_slots.positions.verify(counts, self._device_slots.ids)

    def _plan(self, step_job: StepJob) -> bool:
        """Compute the masks of a job; False: the job has ended."""
        if step_job.job.is_done:
            return False
        try:
            step_job.plan()
            if step_job.is_masked:
                self._device_slots.sampler.late("allowed")  # here it ends no other text
        except ENDS_PROGRAM:
            raise
        except BaseException as error:  # of a filter, or no memory is left
            event = step_job.job.output.finish("error", error=as_text_error(error))
        else:
            if not step_job.masks[0].allowed.must_end:
                return True
            event = step_job.job.output.finish("end_filter")
        self._scheduler.end(step_job.job, event)
        return False

    def _kind(self, step_jobs: list[StepJob]) -> Kind:
        """Return the sampler steps that all running jobs need."""
        jobs = [job for job in self._scheduler.running if job.is_decoding]
        has_mask = any(one.is_masked for one in step_jobs)
        settings = [job.request.settings for job in jobs]
        return Kind.of(
            {id(s): s for s in settings}.values(),  # a hash reads all of a long bias
            masked=has_mask or any(job.slot_mask != FREE for job in jobs),
            top=max(_top(job.request) for job in jobs),
            probabilities=any(_wants_probability(job.request) for job in jobs),
        )

    def _restrict(self, sampling: Sequence[StepJob], position: int) -> None:
        """Restrict the next samples of jobs to their masks at a draft position."""
        sampler, masks = self._device_slots.sampler, dict[int, torch.Tensor | None]()
        for one in sampling:
            mask = one.masks[position]
            if mask.allowed is not UNCONSTRAINED or mask.mask != one.job.slot_mask:
                one.job.slot_mask = mask.mask
                masks[one.slot] = mask.words(sampler.width)
        if masks:
            sampler.allow(masks)

    def catch_up(self) -> None:
        """Read the tokens of the last step."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        self._count(launched)
        for step_job in launched.step_jobs:
            if not step_job.job.is_done:
                step_job.job.launched -= 1 + step_job.accepted
                self._read(step_job, launched)

    def _count(self, launched: _Launched) -> None:
        """Wait for a step, and count the tokens that it brought: the next one begins behind them.

        They are read once that is launched, while the device works.
        """
        if launched.is_counted:
            return
        for result in launched.results:
            result.wait()
        self._device_slots.check_ranks()  # results without a lost one mean nothing
        self._drafting.note(launched.step_jobs, launched.slots, launched.work)
        launched.is_counted = True
        for one in launched.step_jobs:
            if one.draft and not one.job.is_done:
                if ON_DEVICE in one.draft[:1] and launched.drafted is not None:
                    one.draft[:] = launched.drafted[one.slot, : len(one.draft)].tolist()
                ids = [result.id(one.slot) for result in launched.results[: 1 + len(one.draft)]]
                pairs = zip(ids, one.draft, strict=False)
                one.accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                one.is_last = one.job.output.ends_with(ids[: 1 + one.accepted])
                one.rate.note(len(one.job.lead.ids), len(one.draft), one.accepted)
                one.job.launched += one.accepted

    def _read(self, step_job: StepJob, launched: _Launched) -> None:
        """Hand the tokens of a step to a job, up to the first one that is not its draft token."""
        job, slot, top = step_job.job, step_job.slot, _top(step_job.job.request)
        if job.is_stale:
            job.is_stale = False
            if launched.mu is not None:
                self._device_slots.sampler.mu[slot].copy_(launched.mu[slot])
            self._scheduler.advance(job)  # goes back to the last token that was read
            return
        results, own_top = launched.results[: 1 + step_job.accepted], job.request.top_tokens
        tokens = [result.token(slot, top, own_top) for result in results]
        job.steps += 1
        for token, mask in zip(tokens, step_job.masks, strict=False):
            before = len(job.output.ids)
            job.draws.popleft()
            if token.id < 0:
                self._end_without_token(job, mask)
                break
            try:
                self._take(job, token, mask.allowed.ends)
            except ENDS_PROGRAM:
                raise
            except BaseException as error:  # of a hook, or no memory is left to hold a state
                self._scheduler.end(job, job.output.finish("error", error=as_text_error(error)))
            if job.is_done or len(job.output.ids) <= before:
                break

    def _end_without_token(self, job: Job, mask: TokenMask) -> None:
        """End a job that nothing was sampled for: it excludes all ids, or its logits are broken."""
        sampler = self._device_slots.sampler
        message = "the logits are not finite; check the files of the model"
        words, vocabulary = mask.words(sampler.width), {*range(sampler.vocab_size)}
        left = vocabulary if words is None else vocabulary.intersection(ids_of(words))
        left = left.difference(i for i, bias in job.request.settings.token_bias if bias == -inf)
        if not left:
            message = (
                "no token is left to sample: `excluded`, `token_bias`, bans, and stops before "
                "`min_new_tokens` rule out all of them; allow more"
            )
        error = InferenceError(message) if left else TextStuck(message)
        event = job.output.finish("error", error=error)
        self._scheduler.end(job, event, keep=not left)  # others may not read broken values

    def _take(self, job: Job, token: Token, ends: frozenset[int]) -> None:
        job.sampled()
        if job.request.hooks:
            token = self._hooked(job, token)
        token = token.raw()
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
            self._device_slots.replace(s.slot, len(s.ids), seen.sampled_token)
        own = token.own
        if own is not None and isinstance(token.logits, torch.Tensor):
            row, ids = token.logits[None], torch.tensor([seen.sampled_token])
            logs = own_probabilities(row, ids, top=0, vocab_size=row.shape[1]).logs
            own = float(logs.exp()), *own[1:]
        return token._replace(id=seen.sampled_token, probability=None, own=own)


def _top(request: Request) -> int:
    """Return the number of top-k tokens that the request or its hooks need from the sampler."""
    return max(0 if request.raw else request.top_tokens, CANDIDATES if request.hooks else 0)


def _wants_probability(request: Request) -> bool:
    """Return whether the request or its hooks need the probability of the sampler."""
    return bool((request.probabilities and not request.raw) or request.hooks)


def _wants_own(request: Request) -> bool:
    """Return whether the request needs the model's own probabilities."""
    return request.raw and bool(request.probabilities or request.top_tokens)
