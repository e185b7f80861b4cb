"""`Generator`: many texts at once from one model, with continuous batching and a prefix cache.

Each step starts waiting jobs, reads at most `chunk` tokens of their prompts in one pass, and
decodes one token for all jobs whose prompts are read. On a GPU the host reads the tokens of a step
while the next one runs.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Generator as Generated
from contextlib import closing
from dataclasses import replace
from threading import Event as Flag
from threading import Lock
from typing import Any, Unpack, cast, overload
from weakref import WeakSet

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.images import placeholders
from exl2flow.core.requests.request import Request, Text, check_integer, listed
from exl2flow.core.requests.text_options import TextOptions, refuse_unknown
from exl2flow.engine.adapters import adapters_of
from exl2flow.engine.cache.page_pool import PagePool
from exl2flow.engine.cache.paged import PagedCache, cache_format, fitting, pages_of, reserve
from exl2flow.engine.drafts import Drafter
from exl2flow.engine.filters import Combined
from exl2flow.engine.generate.decode import Decode
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.event import Event, Reason
from exl2flow.engine.generate.failures import ENDS_PROGRAM, as_text_error
from exl2flow.engine.generate.hidden_states import HiddenStates
from exl2flow.engine.generate.job import Job
from exl2flow.engine.generate.output import Output
from exl2flow.engine.generate.page_loader import PageLoader
from exl2flow.engine.generate.prefill import Prefill
from exl2flow.engine.generate.prompt import Prompt as EncodedPrompt
from exl2flow.engine.generate.prompt import check, embedded, encoded
from exl2flow.engine.generate.prompt_cache import PromptCache
from exl2flow.engine.generate.scheduler import Scheduler
from exl2flow.engine.generate.sequence_states import SequenceStates
from exl2flow.engine.loading.load import LoadedModel, check_loaded
from exl2flow.engine.sampling import Kind, SamplingSettings
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model.memory.footprint import PROMPT_TOKENS, exact_format

Prompt = Text | tuple[Text, Text]
CHANGEABLE = ("settings", "stops", "hooks", "excluded")
GENERATE_OPTIONS = (*TextOptions.__annotations__, "seed", "abort_event")


def _check_kinds(draft: object, keep: object) -> None:
    """Raise `ConfigError` for an argument of a type that cannot be used."""
    if draft is not None and not hasattr(draft, "start"):
        raise ConfigError(
            f"`draft` is {draft!r}; give a `Draft` with a loaded model, an `NgramDraft`, or a "
            "`HybridDraft` of both"
        )
    if keep is not None and not isinstance(keep, PromptCache):
        raise ConfigError(f"`keep` is {keep!r}; give a `PromptCache`")


def _check_numbers(slots: int, chunk: int, tokens: int | None, page_tokens: int) -> None:
    """Raise `ConfigError` if a number of a generator is none, or out of range."""
    numbers = {"slots": slots, "chunk": chunk, "tokens": tokens, "page_tokens": page_tokens}
    for name, count in numbers.items():
        if count is not None:
            check_integer(name, count)
    if page_tokens < 1:
        raise ConfigError(f"`page_tokens` is {page_tokens}; give 1 or more")
    if slots < 1 or chunk < page_tokens or chunk % page_tokens:
        raise ConfigError(
            f"`slots` is {slots} and `chunk` {chunk}; give one slot or more, and a chunk that "
            f"is a multiple of {page_tokens}"
        )


def _reserved(
    model: LoadedModel,
    draft: Drafter | None,
    cache: str | None,
    tokens: int | None,
    *,
    slots: int,
    page_tokens: int,
) -> PagedCache:
    """Return a cache of a format for `tokens`, or for as many as fit beside the draft's."""
    placement = model.decoder.placement
    name = cache or exact_format(placement.head)
    form = cache_format(name, placement.head)
    if tokens is None:
        placements = [(model.spec, placement), *([] if draft is None else draft.beside(model))]
        others = () if model.team is None else model.team.free()
        tokens = fitting(model.max_tokens, placements, name, slots, others, page_tokens)
    return reserve(
        model.spec,
        pages=pages_of(tokens, page_tokens),
        form=form,
        placement=placement,
        slots=slots,
        page_tokens=page_tokens,
    )


class Generator:
    """Generates texts; not thread-safe but for `submit`, `prepare`, `add` and `Job.cancel`.

    context: positions of one sequence; pages: of the whole cache; page_tokens: positions of a page;
    states: for programs with a loop of their own.
    """

    page_tokens: int = PAGE_TOKENS

    def __init__(
        self,
        model: LoadedModel,
        *,
        cache: str | None = None,
        tokens: int | None = None,
        slots: int = 16,
        chunk: int = PROMPT_TOKENS,
        draft: Drafter | None = None,
        keep: PromptCache | None = None,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        """Reserve a cache for a model.

        Args:
            model: what generates.
            cache: name of the cache's format; None: fp16 on a GPU, fp32 on a CPU.
            tokens: capacity of the cache, shared by all texts; None: one context, or as many as
                fit in the free memory.
            slots: sequences that run at once.
            chunk: prompt tokens per pass (chunked prefill), a multiple of `page_tokens`.
            draft: a `Draft`, an `Mtp`, an `NgramDraft`, or a `HybridDraft` of two (speculative
                decoding); texts do not depend on it.
            keep: where pages go that the cache has no room for, and all of them with `close`; how
                much memory snapshots of states may take.
            page_tokens: of a page of the cache; kernels for GPUs know only 256.

        Raises:
            ConfigError: no such format, a number is out of range, the draft has another
                vocabulary or layers with a state, or pages cannot be kept as `keep` says.
            OutOfDeviceMemory: the cache does not fit.
        """
        check_loaded("model", model)
        _check_numbers(slots, chunk, tokens, page_tokens)
        _check_kinds(draft, keep)
        self.model, self.slots, self.context = model, slots, model.max_tokens
        store = _reserved(model, draft, cache, tokens, slots=slots, page_tokens=page_tokens)
        self.pages, self.page_tokens = store.pages, page_tokens
        longest = min(self.context, self.pages * page_tokens)
        self._device_slots = DeviceSlots(model, store, slots=slots, max_tokens=longest, draft=draft)
        keep, pool = keep or PromptCache(), PagePool(self.pages, page_tokens=page_tokens)
        states = SequenceStates(store.states, pool, nbytes=keep.states)
        self._scheduler = Scheduler(self._device_slots, pool, states, slots=slots)
        drafting = None if draft is None else draft.model
        self._tiers = keep.start(model, self._device_slots, drafting)
        loader = None if self._tiers is None else PageLoader(self._tiers, self._scheduler)
        pool.below = self._tiers
        self._prefill = Prefill(self._device_slots, self._scheduler, loader, chunk=chunk)
        self.states = HiddenStates(
            model, self._device_slots, pool, states, context=self.context, chunk=chunk
        )
        self._decode = Decode(self._device_slots, self._scheduler)
        self._cancelled, self._events = deque[Job](), list[Event]()
        self._submitting = Lock()  # a job is added before a failure ends all, or refused after it
        self._prepared = WeakSet[Job]()  # and not added yet

    def __repr__(self) -> str:
        """Return the model and the size of the cache."""
        tokens = self.pages * self.page_tokens
        return f"Generator({self.model}, tokens={tokens}, slots={self.slots})"

    def submit(self, request: Request, *, deliver: Callable[[Event], None] | None = None) -> Job:
        """Prepare a request and add its job; `deliver` gets its events, not `step`.

        Raises:
            ConfigError, InferenceError, ContextOverflow, CacheFull: what `prepare` refuses.
            InferenceError: the generator has failed.
        """
        job = self.prepare(request, deliver=deliver)
        self.add(job)
        return job

    def prepare(self, request: Request, *, deliver: Callable[[Event], None] | None = None) -> Job:
        """Check and encode a request and start its filters, beside steps that run meanwhile.

        The job takes no slot and no page; `add` puts it in the queue, and dropping it is free.
        `deliver` gets its events in the thread of `step`, which otherwise returns them.

        Raises:
            ConfigError, InferenceError, ContextOverflow, CacheFull: what `check` refuses.
            InferenceError: the generator has failed.
        """
        try:
            return self._prepare(request, deliver)
        except (Exception, *ENDS_PROGRAM):
            raise
        except BaseException as error:  # a panic of an encoder or a grammar
            raise as_text_error(error) from error

    def _prepare(self, request: Request, deliver: Callable[[Event], None] | None) -> Job:
        self._device_slots.check_works()
        tokenizer, width = self.model.tokenizer, self._device_slots.sampler.width
        prompt = embedded(encoded(request, tokenizer), request.embeddings, self.model.decoder)
        max_new_tokens = self._check(request, prompt)
        healed = "" if prompt.healed is None else tokenizer.pieces[prompt.healed]
        constraint = request.filters and Combined(
            request.filters,
            tokenizer,
            width,
            prefix=healed,
            prefer_end=request.prefer_end,
            stops=request.stops,
        )
        job = Job(
            request,
            prompt,
            Output(request, tokenizer, prompt, max_new_tokens=max_new_tokens),
            adapters=adapters_of(request.adapters, self.model),
            constraint=constraint or None,
            deliver=deliver or self._events.append,
            on_cancel=self._cancelled.append,
        )
        with self._submitting:
            self._prepared.add(job)
        return job

    def add(self, job: Job) -> None:
        """Put a prepared job at the end of the queue, once; one that was cancelled just ends.

        Raises:
            ConfigError: the job was added before, or another generator prepared it.
            InferenceError: the generator has failed.
        """
        with self._submitting:
            self._device_slots.check_works()
            if job not in self._prepared:
                raise ConfigError(
                    "the job was added before, or another generator prepared it; prepare its "
                    "request again"
                )
            self._prepared.remove(job)
            if not job.is_done:
                job.queued()
                self._scheduler.add(job)

    def _check(self, request: Request, prompt: EncodedPrompt) -> int:
        """Refuse a request that the model cannot run; return its limit of new tokens."""
        max_new_tokens = check(
            request,
            prompt,
            vocab_size=self.model.spec.vocab_size,
            context=self.context,
            pages=self.pages,
            page_tokens=self.page_tokens,
            slots=self.slots,
            images=placeholders(self.model.spec.config),
        )
        self._device_slots.sampler.check(request.settings)
        return max_new_tokens

    @torch.inference_mode()
    def change(self, job: Job, **fields: Any) -> None:
        """Continue a job with other `settings`, `stops`, `hooks` or `excluded` of its request.

        Raises:
            ConfigError, InferenceError: what `submit` refuses; the job continues as before.
        """
        refuse_unknown(fields, CHANGEABLE, "change")
        before, request = job.request, replace(job.request, **fields)
        self._check(request, job.prompt)
        job.change(request)
        if job.is_decoding and request.settings != before.settings:
            self._scheduler.preempt(job)  # its slot gets the settings when it continues

    @property
    def failure(self) -> Exception | None:
        """The error that ended all jobs, and the generator with them."""
        return self._device_slots.failure

    @property
    def free_pages(self) -> int:
        """Pages that no job uses."""
        return self._scheduler.page_pool.free

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of pages in host memory (ram) and on disk."""
        return {"ram": 0, "disk": 0} if self._tiers is None else self._tiers.nbytes

    @property
    def preemptions(self) -> int:
        """The number of jobs that were preempted so far."""
        return self._scheduler.preemptions

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return self._scheduler.is_idle

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one prefill pass and one decode step, and return the events since the last call.

        After a failure nothing is run.

        Raises:
            Exception: a failure that no job can report, because there is none.
        """
        if self.failure is None:
            self._device_slots.check_stream()
            try:
                self._end_cancelled()
                self._scheduler.admit()
                self._prefill.step()
                self._decode.step()
            except ENDS_PROGRAM:
                raise
            except BaseException as error:  # the device may be in any state
                if not self.fail(error):
                    raise
        events = self._events[:]
        del self._events[: len(events)]
        return events

    def close(self) -> None:
        """Write the pages of the cache to the disk of `keep`; none are kept from then on.

        The generator may go on. Without `keep`, or after a failure, nothing is written.
        """
        if self._tiers is not None:
            is_good = self.failure is None
            self._tiers.close(self._scheduler.page_pool.full() if is_good else None)

    def fail(self, error: BaseException) -> bool:
        """End all jobs with an error, and refuse further ones; False: there was no job."""
        failure = error if isinstance(error, Exception) else as_text_error(error)
        with self._submitting:
            self._device_slots.failure = failure  # first: then nothing more runs in any case
            jobs = self._scheduler.abandon()
        for job in jobs:
            self._scheduler.end(job, job.output.finish("error", error=failure))
        return bool(jobs)

    def cancel(self, job: Job) -> None:
        """End a job and free its pages at once; unlike `Job.cancel`, not from other threads."""
        self._drop([job])

    def cancel_all(self) -> None:
        """End all jobs."""
        self._drop(self._scheduler.all())

    def stream(self, *requests: Request, abort_event: Flag | None = None) -> Generated[Event]:
        """Yield the events of requests as they come; giving the iteration up ends their jobs.

        Args:
            requests: what to generate.
            abort_event: when it is set, all texts end where they are.

        Raises:
            Exl2FlowError: what `submit` refuses, or the error of a request that is the only one.
        """
        events, jobs = deque[Event](), list[Job]()
        try:
            for request in requests:
                jobs.append(self.submit(request, deliver=events.append))
            left = len(jobs)
            while events or left:
                while events:
                    event = events.popleft()
                    left -= event.reason is not None
                    yield event
                    if event.error is not None and len(jobs) == 1:
                        raise event.error
                if abort_event is not None and abort_event.is_set():
                    self._drop(jobs)
                else:
                    self._events.extend(self.step())
        finally:
            self._drop(jobs)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompts: str,
        *,
        seed: int | None = None,
        abort_event: Flag | None = None,
        **options: Unpack[TextOptions],
    ) -> str: ...
    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        seed: int | None = None,
        abort_event: Flag | None = None,
        **options: Unpack[TextOptions],
    ) -> list[str]: ...
    def generate(
        self,
        prompts: str | Iterable[Prompt],
        *,
        seed: int | None = None,
        abort_event: Flag | None = None,
        **options: Unpack[TextOptions],
    ) -> str | list[str]:
        """Return the completion of a prompt, or of each of several prompts, in their order.

        Args:
            prompts: a text, or texts, lists of token ids, and tuples of two for guidance.
            seed: of the first prompt's draws, one more for each prompt after it.
            abort_event: see `stream`.
            options: fields of `Request` but `tag`, the same for all.

        Raises:
            Exl2FlowError: what `submit` refuses, or the first error of a text.
        """
        if seed is not None:
            check_integer("seed", seed)
        refuse_unknown(options, GENERATE_OPTIONS, "generate")
        requests = [
            Request(text, seed=None if seed is None else seed + index, tag=index, **options)
            for index, text in enumerate(listed(prompts))
        ]
        completions = [""] * len(requests)
        with closing(self.stream(*requests, abort_event=abort_event)) as events:
            for event in events:
                if event.error is not None:
                    raise event.error
                completions[cast(int, event.tag)] += event.text
        return completions[0] if isinstance(prompts, str) else completions

    @torch.inference_mode()
    def _drop(self, jobs: list[Job]) -> None:
        """End jobs at once."""
        for job in jobs:
            job.cancel()
        self._end_cancelled()

    def _end_cancelled(self) -> None:
        while self._cancelled:
            job = self._cancelled.popleft()
            if not job.is_done:
                reason: Reason = "cancelled" if job.error is None else "error"
                self._scheduler.end(job, job.output.finish(reason, error=job.error))

    @torch.inference_mode()
    def warmup(self) -> None:
        """Record the decode steps of all batch sizes, for greedy and for default settings.

        Raises:
            InferenceError: the generator has failed.
        """
        self._device_slots.check_works()
        self._device_slots.warm_up(
            [Kind.of([s]) for s in (SamplingSettings.greedy(), SamplingSettings())]
        )
