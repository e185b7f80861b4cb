"""What decode steps verify: asks the proposer, as far as that is worth it, and times steps."""

import time
from collections.abc import Iterator, Sequence
from itertools import takewhile

from exl2flow.engine.drafts import ON_DEVICE, DraftKind, DraftRequest, Proposal
from exl2flow.engine.drafts.costs import StepCosts
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.job import Job
from exl2flow.engine.generate.scheduler import Scheduler
from exl2flow.engine.generate.step_job import StepJob

RESTS = 8  # steps without a draft behind one in which texts had better draft nothing


class Drafting:
    """Decides which steps have draft tokens, and how many."""

    def __init__(self, device_slots: DeviceSlots, scheduler: Scheduler) -> None:
        self._device_slots, self._scheduler = device_slots, scheduler
        self._costs, self._read_at = StepCosts(device_slots.drafts), 0.0
        self._work = -1  # of the step before
        self._resting = 0  # steps that ask for no draft

    def is_wanted(self, jobs: Sequence[Job], slots: int) -> bool:
        """Return whether the next step may have draft tokens; last tokens may be unknown yet."""
        proposer = self._device_slots.proposer
        if proposer is None or not jobs or not self._costs.compares(slots):
            return False
        self._resting -= 1
        if self._resting >= 0:
            return False
        requests = self._requests(jobs, slots)
        return any([proposer.wants(request) for request in requests.values()])

    def step_jobs(self, jobs: Sequence[Job], slots: int, *, is_drafting: bool) -> list[StepJob]:
        """Return the jobs of a step, with draft tokens."""
        proposer = self._device_slots.proposer
        if proposer is None or not jobs:
            return [StepJob(job, []) for job in jobs]
        requests = self._requests(jobs, slots)
        if not is_drafting:
            proposer.follow(requests)
            return [StepJob(job, []) for job in jobs]
        proposals = proposer.propose(requests)
        own = [proposals[job.lead.slot] for job in jobs]
        step_jobs = [
            StepJob(job, [*proposal.ids], kind=proposal.kind)
            for job, proposal in zip(jobs, self._known(jobs, own), strict=True)
        ]
        most = self._worth(step_jobs, slots)
        for one in step_jobs:
            del one.draft[self._scheduler.reserve_ahead(one.job, min(most, len(one.draft))) :]
        return step_jobs

    def note(self, step_jobs: Sequence[StepJob], slots: int, work: int) -> None:
        """Note the time since the results of the step before, if only this one was run in it.

        work: that the device had been given when the step was launched; see `DeviceSlots.work`.
        """
        now, before = time.perf_counter(), self._read_at
        is_alone = self._work == work == self._device_slots.work
        self._read_at, self._work = now, work
        drafting = [one for one in step_jobs if one.draft]
        if is_alone:
            most = max([len(one.draft) for one in drafting], default=0)
            self._costs.note(slots, _kind_of(drafting), most, now - before)

    def _requests(self, jobs: Sequence[Job], slots: int) -> dict[int, DraftRequest]:
        limit = self._device_slots.max_drafts(slots)
        return {
            s.slot: DraftRequest(
                owner=s,
                ids=s.ids,
                length=len(s.ids) + job.launched,
                pages=s.held.pages,
                limit=job.max_drafts(limit) if s is job.lead else 0,
                acceptance=job.acceptance,
                slots=slots,
                costs=self._costs,
            )
            for job in jobs
            for s in job.sequences
        }

    def _known(self, jobs: Sequence[Job], proposals: Sequence[Proposal]) -> Iterator[Proposal]:
        """Yield proposals with the ids that the host must know, up to one that no text may hold."""
        vocabulary, ids = range(self._device_slots.sampler.vocab_size), None
        for job, proposal in zip(jobs, proposals, strict=True):
            found = proposal.ids
            if ON_DEVICE in found[:1]:
                if not job.reads_drafts:
                    yield proposal
                    continue
                if ids is None:
                    assert self._device_slots.proposer is not None
                    assert self._device_slots.proposer.drafted is not None
                    ids = self._device_slots.proposer.drafted.tolist()
                found = ids[job.lead.slot][: len(found)]
            yield proposal._replace(ids=[*takewhile(vocabulary.__contains__, found)])

    def _worth(self, step_jobs: Sequence[StepJob], slots: int) -> int:
        """Return the draft tokens at which a step of several texts should end.

        Where that is none, the next steps do not ask for any.
        """
        if len(step_jobs) < 2:
            return self._device_slots.drafts
        texts = [(one.rate.rate if one.draft else 0.0, len(one.draft)) for one in step_jobs]
        most = self._costs.shared(slots, _kind_of([one for one in step_jobs if one.draft]), texts)
        self._resting = RESTS if not most else 0
        return most


def _kind_of(drafting: Sequence[StepJob]) -> str:
    """Return the kind of a step's draft tokens, of several that which costs more."""
    kinds = [one.kind for one in drafting if one.kind is not None]
    return max(kinds, key=DraftKind.NGRAM.__ne__, default="")
