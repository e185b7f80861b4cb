"""`Generator`: many texts at once from one model; prompts and texts that begin alike share pages.

Each step starts waiting jobs, reads at most `chunk` tokens of their prompts in one pass, and decodes
one token for all jobs whose prompts are read. On a GPU the host reads the tokens of a step while
the next one runs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from threading import Event as Flag
from typing import Any, overload

import torch

from exl2flow.core.errors import ConfigError, InferenceError, OutOfDeviceMemory
from exl2flow.core.memory import available_memory, free_memory
from exl2flow.inference.cache.paged import PagedCache, cache_format, pages_of
from exl2flow.inference.cache.pages import PageTable
from exl2flow.inference.generate.arrival import Arrival
from exl2flow.inference.generate.event import Event, Reason, Token
from exl2flow.inference.generate.job import FREE, Job
from exl2flow.inference.generate.prompt import check, encoded
from exl2flow.inference.generate.request import Request, Sampled, Text
from exl2flow.inference.generate.schedule import Pass, Schedule
from exl2flow.inference.generate.steps import Steps
from exl2flow.inference.load import LoadedModel
from exl2flow.inference.sampling import Kind, SamplingSettings
from exl2flow.inference.sampling.bits import words_of
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import check_ids
from exl2flow.model.footprint import PROMPT_TOKENS, cache_bytes

CANDIDATES = 64  # that a hook sees
SHARE = 0.7  # of the free memory for a cache whose size nobody states


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device works on: its jobs with the slots that sample, and what arrives."""

    jobs: list[tuple[Job, int]]
    arrival: Arrival


class Generator:
    """Generates texts; not thread-safe but for `submit` and `Job.cancel`.

    spec: of the model. context: positions of one sequence. pages: of the cache.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        cache: str | None = None,
        tokens: int | None = None,
        slots: int = 16,
        chunk: int = PROMPT_TOKENS,
    ) -> None:
        """Reserve a cache for a model.

        Args:
            model: what generates.
            cache: name of the cache's format; None: fp16 on a GPU, fp32 on a CPU.
            tokens: that the cache holds, of all texts together; None: one context, or as many as
                fit in the free memory.
            slots: sequences that run at once.
            chunk: tokens of prompts that one pass reads, a multiple of 256.

        Raises:
            ConfigError: there is no such format, or a number is out of range.
            OutOfDeviceMemory: the cache does not fit.
        """
        if slots < 1 or chunk < PAGE_TOKENS or chunk % PAGE_TOKENS:
            raise ConfigError(
                f"`slots` is {slots} and `chunk` {chunk}; give one slot or more, and a chunk that "
                f"is a multiple of {PAGE_TOKENS}"
            )
        self.model, self.slots, self.context = model, slots, model.max_tokens
        device = model.decoder.embedding.weight.device
        name = cache or ("fp16" if device.type == "cuda" else "fp32")
        form = cache_format(name, device)
        self.pages = pages_of(tokens or _fitting(model, name, device))
        try:
            pool = PagedCache(model.spec, pages=self.pages, form=form, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"a `{name}` cache of {self.pages * PAGE_TOKENS} tokens does not fit in the memory "
                "of the GPU; give fewer `tokens`, or a format with fewer bits"
            ) from error
        self._steps = Steps(
            model, pool, slots=slots, max_tokens=min(self.context, self.pages * PAGE_TOKENS)
        )
        self._schedule = Schedule(
            self._steps, PageTable(self.pages), slots=slots, chunk=chunk, catch_up=self._catch_up
        )
        self._launched: _Launched | None = None
        self._cancelled = deque[Job]()
        self._events: list[Event] = []
        self._failure: Exception | None = None

    def submit(self, request: Request, *, deliver: Callable[[Event], None] | None = None) -> Job:
        """Put a request in the queue; any thread may do so.

        Args:
            request: what to generate.
            deliver: gets the request's events instead of those who call `step`.

        Raises:
            ConfigError, InferenceError, ContextOverflow, CacheFull: what `check` refuses.
        """
        if self._failure is not None:
            raise InferenceError("the generator has failed; make a new one") from self._failure
        tokenizer = self.model.tokenizer
        prompt = encoded(request, tokenizer)
        most = check(
            request, prompt, vocab_size=self.model.spec.vocab_size, context=self.context,
            pages=self.pages, slots=self.slots,
        )  # fmt: skip
        job = Job(
            request, prompt, tokenizer, max_new_tokens=most, begin=self._schedule.table.begin,
            deliver=deliver or self._events.append, on_cancel=self._cancelled.append,
        )  # fmt: skip
        self._schedule.add(job)
        return job

    @property
    def free_pages(self) -> int:
        """Pages that no job uses."""
        return self._schedule.table.free

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return self._launched is None and self._schedule.is_idle

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Do a part of the work, and return what happened since the last call."""
        try:
            self._end_cancelled()
            self._schedule.admit()
            self._read_prompts()
            self._decode()
        except Exception as error:  # nothing is known of the device any more
            self._fail(error)
        events = self._events[:]
        del self._events[: len(events)]
        return events

    def _read_prompts(self) -> None:
        work = self._schedule.next_pass()
        if work is None:
            return
        try:
            self._read(work)
        except torch.OutOfMemoryError as error:
            for part in work.parts:
                self._read_alone(part[0], Pass([part]), error)

    def _read(self, work: Pass) -> None:
        self._steps.read(work.ids, work.segments)
        self._schedule.has_read(work)

    def _read_alone(self, job: Job, work: Pass, error: Exception) -> None:
        torch.cuda.empty_cache()
        try:
            if job in self._schedule.running:
                self._read(work)
        except torch.OutOfMemoryError:
            count = sum(count for *_, count in work.parts)
            failure = OutOfDeviceMemory(
                f"no memory is left on the GPU to read {count} tokens of a prompt; give the "
                "generator a smaller `chunk` or fewer `tokens`"
            )
            failure.__cause__ = error
            self._end(job, "error", error=failure, keep=False)

    def _decode(self) -> None:
        """Launch the next step for all that need not wait for the last one, then read that."""
        if self._launched is not None and any(job.output.waits for job, _ in self._launched.jobs):
            self._catch_up()
        self._schedule.make_room()
        launched = self._launch()
        self._catch_up()
        self._launched = launched
        if not self._steps.ahead:
            self._catch_up()

    def _launch(self) -> _Launched | None:
        self._schedule.close_gaps()
        jobs = [job for job in self._schedule.running if job.steps and job.wants_more]
        if not jobs:
            return None
        draws = [0.0] * self._schedule.top
        taken: list[tuple[Job, int]] = []
        for job in jobs:
            slot = job.lead.slot
            assert slot is not None
            draws[slot] = job.random.random()
            self._set_mask(job, slot)
            job.launched += 1
            taken.append((job, slot))
        sampled = self._steps.run(len(draws), self._kind(), draws)
        rows = [slot for job, slot in taken if job.request.logits or job.request.hooks]
        return _Launched(taken, Arrival(sampled, self._steps.logits, rows))

    def _kind(self) -> Kind:
        """Return the operations that serve all jobs that are decoded."""
        jobs = [job for job in self._schedule.running if job.steps]
        return Kind.of(
            {job.request.settings for job in jobs},
            masked=any(job.mask != FREE for job in jobs),
            top=max(_top(job.request) for job in jobs),
            probabilities=any(job.request.probabilities or job.request.hooks for job in jobs),
        )

    def _set_mask(self, job: Job, slot: int) -> None:
        mask = job.next_mask()
        if mask == job.mask:
            return
        job.mask, width = mask, self._steps.sampler.width
        only, without = mask
        words = None
        if only is not None:
            words = words_of(set(only) - without, width)
        elif without:
            words = ~words_of(without, width)
        self._steps.sampler.allow(slot, words)

    def _catch_up(self) -> None:
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
                self._take(job, slot, token)
            except Exception as error:  # of a hook, or of this job's logits
                self._end(job, "error", error=error, keep=token.id >= 0)

    def _take(self, job: Job, slot: int, token: Token) -> None:
        if token.id < 0:
            raise InferenceError("the logits are not finite; check the files of the model")
        job.sampled()
        if job.request.hooks:
            token = self._hooked(job, slot, token)
        outcome = job.output.push(token)
        if job.output.reason is not None:
            assert outcome.event is not None
            self._finish(job, outcome.event)
            return
        if outcome.event is not None:
            job.deliver(outcome.event)
        self._schedule.accept(job)

    def _hooked(self, job: Job, slot: int, token: Token) -> Token:
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
        check_ids([seen.sampled_token], self.model.spec)
        for s in job.sequences:
            assert s.slot is not None
            self._steps.replace(s.slot, len(s.ids), seen.sampled_token)
        return token._replace(id=seen.sampled_token, probability=None)

    def _end(
        self, job: Job, reason: Reason, *, error: Exception | None = None, keep: bool = True
    ) -> None:
        """End a job from outside; nothing happens if it has ended."""
        if not job.is_done:
            self._finish(job, job.output.finish(reason, error=error), keep=keep)

    def _finish(self, job: Job, event: Event, *, keep: bool = True) -> None:
        job.is_done = True
        self._schedule.end(job, keep=keep)
        job.deliver(replace(event, statistics=job.statistics()))

    def _fail(self, error: Exception) -> None:
        """End all jobs after an error that may have left the device in any state."""
        self._failure, self._launched = error, None
        for job in self._schedule.all():
            job.is_done = True
            job.deliver(job.output.finish("error", error=error))

    def cancel_all(self) -> None:
        """End all jobs."""
        for job in self._schedule.all():
            self._end(job, "cancelled")

    def stream(self, *requests: Request) -> Iterator[Event]:
        """Yield the events of requests as they come; giving the iteration up ends their jobs.

        Raises:
            Exl2FlowError: what `submit` refuses, or the error of a request that is the only one.
        """
        events = deque[Event]()
        jobs: list[Job] = []
        try:
            jobs += [self.submit(request, deliver=events.append) for request in requests]
            while events or not all(job.is_done for job in jobs):
                while events:
                    event = events.popleft()
                    yield event
                    if event.error is not None and len(jobs) == 1:
                        raise event.error
                self._events.extend(self.step())
        finally:
            self._drop(jobs)

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...
    @overload
    def generate(
        self, prompts: Iterable[Text | tuple[Text, Text]], **options: Any
    ) -> list[str]: ...
    def generate(
        self,
        prompts: str | Iterable[Text | tuple[Text, Text]],
        *,
        seed: int | None = None,
        abort_event: Flag | None = None,
        **options: Any,
    ) -> str | list[str]:
        """Return the completion of a prompt, or of each of several prompts, in their order.

        Args:
            prompts: a text, or texts, lists of token ids, and tuples of two for guidance.
            seed: of the first prompt's draws, one more for each prompt after it.
            abort_event: when it is set, all texts end where they are.
            options: fields of `Request`, the same for all.

        Raises:
            Exl2FlowError: what `submit` refuses, or the first error of a text.
        """
        single = isinstance(prompts, str)
        texts: list[Text | tuple[Text, Text]] = (
            [prompts] if isinstance(prompts, str) else [*prompts]
        )
        seeds = [None if seed is None else seed + index for index in range(len(texts))]
        requests = [Request(t, seed=s, **options) for t, s in zip(texts, seeds, strict=True)]
        jobs: list[Job] = []
        errors: list[Exception] = []

        def deliver(event: Event) -> None:
            if event.error is not None:
                errors.append(event.error)

        try:
            jobs += [self.submit(request, deliver=deliver) for request in requests]
            while not (errors or all(job.is_done for job in jobs)):
                if abort_event is not None and abort_event.is_set():
                    break
                self._events.extend(self.step())
        finally:
            self._drop(jobs)
        if errors:
            raise errors[0]
        completions = [job.output.text for job in jobs]
        return completions[0] if single else completions

    def _drop(self, jobs: list[Job]) -> None:
        """End jobs at once."""
        for job in jobs:
            job.cancel()
        self._end_cancelled()

    def _end_cancelled(self) -> None:
        while self._cancelled:
            self._end(self._cancelled.popleft(), "cancelled")

    @torch.inference_mode()
    def warmup(self) -> None:
        """Record the steps of all numbers of slots, for greedy and for default settings."""
        kinds = [Kind.of([s]) for s in (SamplingSettings.greedy(), SamplingSettings())]
        self._steps.warm_up(kinds)


def _top(request: Request) -> int:
    """Return how many of the likeliest tokens somebody wants to see."""
    return max(request.top_tokens, CANDIDATES if request.hooks else 0)


def _fitting(model: LoadedModel, name: str, device: torch.device) -> int:
    """Return the tokens of one context, or as many as fit in the free memory."""
    room = free_memory(device) if device.type == "cuda" else available_memory()
    if room is None:
        return model.max_tokens
    page = cache_bytes(model.spec, context=1, cache_format=name)
    return max(PAGE_TOKENS, min(model.max_tokens, int(SHARE * room) // page * PAGE_TOKENS))
