"""Decode steps: launched for all jobs that can go on, read one step later, token by token."""

from dataclasses import dataclass
from weakref import WeakMethod

from exl2flow.core.errors import InferenceError
from exl2flow.core.request import Request, Sampled
from exl2flow.inference.filters import prepare
from exl2flow.inference.generate.arrival import Arrival
from exl2flow.inference.generate.bans import allowed_by
from exl2flow.inference.generate.event import Token
from exl2flow.inference.generate.job import FREE, Job
from exl2flow.inference.generate.schedule import Schedule
from exl2flow.inference.generate.steps import Steps
from exl2flow.inference.sampling import Kind
from exl2flow.inference.sampling.bits import words_of

CANDIDATES = 64  # that a hook sees


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device works on: its jobs with the slots that sample, and what arrives."""

    jobs: list[tuple[Job, int]]
    arrival: Arrival


class Decoding:
    """Samples a token for each job whose prompt is read, and hands it to the job's output."""

    def __init__(self, steps: Steps, schedule: Schedule) -> None:
        self._steps, self._schedule = steps, schedule
        self._launched: _Launched | None = None
        schedule.catch_up = WeakMethod(self.catch_up)

    def step(self) -> None:
        """Launch the next step for all that need not wait for the last one, then read that."""
        if self._launched is not None and any(job.output.waits for job, _ in self._launched.jobs):
            self.catch_up()
        self._schedule.make_room()
        jobs, slots = self._forward()
        if any(job.constraint is not None for job in jobs):
            self.catch_up()  # what a constraint allows follows from the last token
        launched = self._sample(jobs, slots)
        self.catch_up()
        self._launched = launched
        if not self._steps.ahead:
            self.catch_up()

    def _forward(self) -> tuple[list[Job], int]:
        """Launch the next forward pass; return the jobs that sample from it, and its slots."""
        self._schedule.close_gaps()
        jobs = [job for job in self._schedule.running if job.steps and job.wants_more]
        slots = self._schedule.top if jobs else 0
        if jobs:
            self._steps.forward(slots)
        for job in jobs:
            job.launched += 1
        return jobs, slots

    def _sample(self, jobs: list[Job], slots: int) -> _Launched | None:
        draws, taken = [0.0] * slots, list[tuple[Job, int]]()
        prepare(p for job in jobs if job.constraint is not None for p in job.constraint.parts)
        for job in jobs:
            if not self._set_mask(job):
                continue
            draws[job.lead.slot] = job.random.random()
            taken.append((job, job.lead.slot))
        if not taken:
            return None
        sampled = self._steps.sample(slots, self._kind(), draws)
        rows = [slot for job, slot in taken if job.request.logits or job.request.hooks]
        return _Launched(taken, Arrival(sampled, self._steps.logits, rows))

    def _kind(self) -> Kind:
        """Return the operations that serve all jobs that are decoded."""
        jobs = [job for job in self._schedule.running if job.steps]
        return Kind.of(
            {job.request.settings for job in jobs},
            masked=any(job.mask != FREE or job.constraint is not None for job in jobs),
            top=max(_top(job.request) for job in jobs),
            probabilities=any(job.request.probabilities or job.request.hooks for job in jobs),
        )

    def _set_mask(self, job: Job) -> bool:
        """Set what the next sample may take; False: the job has ended."""
        if job.is_done:
            return False
        mask, width, words = job.next_mask(), self._steps.sampler.width, None
        if mask == job.mask and job.constraint is None:
            return True
        only, without = job.mask = mask
        if job.constraint is not None:
            try:
                allowed = allowed_by(job.constraint, only, without, job.output.cut)
            except Exception as error:  # of a filter
                self._schedule.end(job, job.output.finish("error", error=error))
                return False
            if allowed.must_end:
                self._schedule.end(job, job.output.finish("end_filter"))
                return False
            words, job.ends = allowed.words, allowed.ends
        elif only is not None:
            words = words_of(set(only) - without, width)
        elif without:
            words = ~words_of(without, width)
        self._steps.sampler.allow(job.lead.slot, words)
        return True

    def catch_up(self) -> None:
        """Read what the last step sampled."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        launched.arrival.wait()
        for job, slot in launched.jobs:
            if job.is_done:
                continue
            job.launched -= 1
            token = launched.arrival.token(slot, _top(job.request))
            try:
                self._take(job, token)
            except Exception as error:  # of a hook, or of this job's logits
                event = job.output.finish("error", error=error)
                self._schedule.end(job, event, keep=token.id >= 0)

    def _take(self, job: Job, token: Token) -> None:
        if token.id < 0:
            raise InferenceError("the logits are not finite; check the files of the model")
        job.sampled()
        if job.request.hooks:
            token = self._hooked(job, token)
        event = job.output.push(token)
        if event is not None and event.reason is not None:
            self._schedule.end(job, event)
            return
        if event is not None:
            job.deliver(event)
        if job.follows(token.id, len(event.suppressed_ids) if event is not None else 0):
            self._schedule.accept(job)
        else:
            self._schedule.end(job, job.output.finish("end_filter"))

    def _hooked(self, job: Job, token: Token) -> Token:
        """Let the hooks see a token and replace it."""
        seen = Sampled(
            sampled_token=token.id, sampled_prob=token.probability or 0.0,
            candidate_tokens=token.top_ids, candidate_probs=token.top_probabilities,
            logits=token.logits,
        )  # fmt: skip
        for hook in job.request.hooks:
            hook(seen)
        if seen.sampled_token == token.id:
            return token
        for s in job.sequences:
            self._steps.replace(s.slot, len(s.ids), seen.sampled_token)
        return token._replace(id=seen.sampled_token, probability=None)


def _top(request: Request) -> int:
    """Return how many of the likeliest tokens somebody wants to see."""
    return max(request.top_tokens, CANDIDATES if request.hooks else 0)
