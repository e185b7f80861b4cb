"""Texts are as they are alone, however jobs are prepared, added, cancelled and preempted."""

import tempfile
from functools import cache
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_pages import PAGE_TOKENS, small_generator
from tiny import make_tiny

from exl2flow.inference import Event, Generator, Job, LoadedModel, Request, SamplingSettings
from exl2flow.inference import load_model as load

GREEDY = SamplingSettings.greedy()
WARM = SamplingSettings(temperature=1.5, top_k=0, top_p=1.0, repetition_penalty=1.3)
PAGES = 6


@cache
def model() -> LoadedModel:
    folder = Path(tempfile.mkdtemp(prefix="exl2flow-"))
    return load(make_tiny("llama", folder / "tiny"), device="cpu", max_tokens=768)


@cache
def alone() -> Generator:
    return Generator(model(), tokens=1024, slots=1)


@cache
def expected(request: Request) -> tuple[int, ...]:
    return tuple(token for event in alone().stream(request) for token in event.ids)


class Jobs(RuleBasedStateMachine):
    """A generator with few pages; prompts come from a few beginnings, so that pages are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = small_generator(
            model(), tokens=PAGES * PAGE_TOKENS, slots=3, chunk=PAGE_TOKENS
        )
        self.jobs: list[Job] = []
        self.prepared: list[Job] = []  # and not added yet
        self.events: dict[Job, list[Event]] = {}

    @rule(
        beginning=st.sampled_from([(5,), (6, 7) * 4, (8, 9, 10) * 9]),
        rest=st.lists(st.integers(5, 7), max_size=3),
        tokens=st.sampled_from([1, 3, 24]),
        how=st.sampled_from([GREEDY, WARM]),
        seed=st.integers(0, 2),
        skips=st.sampled_from([0, 4, None]),
        at_once=st.booleans(),
    )
    def prepare(self, beginning: tuple[int, ...], rest: list[int], **options: object) -> None:
        request = Request(
            (*beginning, *rest),
            max_new_tokens=options["tokens"],
            settings=options["how"],
            seed=options["seed"],
            max_skips=options["skips"],
            stops=(),
        )
        events: list[Event] = []
        make = self.generator.submit if options["at_once"] else self.generator.prepare
        job = make(request, deliver=events.append)
        self.jobs.append(job)
        self.prepared += [] if options["at_once"] else [job]
        self.events[job] = events

    @precondition(lambda self: self.prepared)
    @rule(which=st.integers(0, 100))
    def add(self, which: int) -> None:
        self.generator.add(self.prepared.pop(which % len(self.prepared)))

    @rule(count=st.sampled_from([1, 2, 15]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.generator.step()

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 100), steps=st.integers(0, 1))
    def cancel(self, which: int, steps: int) -> None:
        self.jobs[which % len(self.jobs)].cancel()
        for _ in range(steps):
            self.generator.step()

    @precondition(lambda self: self.generator._scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.generator._scheduler.preempt(self.generator._scheduler.running[-1])

    @invariant()
    def pages_are_used_by_running_jobs(self) -> None:
        schedule = self.generator._scheduler
        used = {page for job in schedule.running for s in job.sequences for page in s.held.pages}
        assert schedule.page_pool.free == PAGES - len(used)
        slots = [s.slot for job in schedule.running for s in job.sequences]
        assert sorted([*slots, *schedule._free]) == [0, 1, 2]

    def teardown(self) -> None:
        for job in self.prepared:
            self.generator.add(job)
        while not self.generator.is_idle:
            self.generator.step()
        assert self.generator.free_pages == PAGES
        for job, events in self.events.items():
            ids = tuple(token for event in events for token in event.ids)
            text = expected(job.request)
            assert [event.reason for event in events if event.reason] == [events[-1].reason]
            if events[-1].reason == "cancelled":
                assert ids == text[: len(ids)]
            else:
                assert ids == text


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
