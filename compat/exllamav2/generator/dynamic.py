"""Jobs, which all generators run, and `ExLlamaV2DynamicGenerator`, which runs many at once."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import torch

from exl2flow.compat.exllamav2.cache import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator.filters import native_filters
from exl2flow.compat.exllamav2.generator.sampler import ExLlamaV2Sampler, call_hook
from exl2flow.compat.exllamav2.model import ExLlamaV2, adapters
from exl2flow.compat.exllamav2.tensors import SeqTensor
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import FIRST_EMBEDDING, Request
from exl2flow.engine import Draft, Event, Generator, Job, NgramDraft
from exl2flow.engine.generate.event import Statistics, TextPiece

Settings = ExLlamaV2Sampler.Settings
STAGES = {"started": "started", "prompt": "prefill", "text": "streaming"}


class ExLlamaV2DynamicJob:
    """A text to generate; `native` is our job, once it is in a queue."""

    def __init__(
        self,
        input_ids: Any,
        max_new_tokens: Any,
        min_new_tokens: int = 0,
        max_skips: int | None = 4,
        gen_settings: Settings | None = None,
        seed: int | None = None,
        stop_conditions: Iterable[int | str] | None = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: Iterable[Any] | None = None,
        filter_prefer_eos: bool = False,
        token_healing: bool = False,
        identifier: object = None,
        banned_strings: Sequence[str] | None = None,
        embeddings: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        tensors = [input_ids] if isinstance(input_ids, torch.Tensor) else input_ids
        self.prompts, self.embeddings = [_ids(ids) for ids in tensors], embeddings or ()
        self.gen_settings = Settings() if gen_settings is None else gen_settings
        self.max_new_tokens, self.identifier = max_new_tokens, identifier
        self._request = partial(
            Request,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            seed=seed,
            stops=[*(stop_conditions or ())],
            decode_special=decode_special_tokens,
            top_tokens=return_top_tokens,
            logits=return_logits,
            probabilities=return_probs,
            prefer_end=filter_prefer_eos and bool(filters),
            heal=token_healing,
            banned_strings=banned_strings or (),
            max_skips=max_skips,
            tag=self,
            filters=native_filters(filters),
        )
        self.native: Job | None = None
        self.serial_number: int | None = None
        self.is_started, self.full_completion = False, ""

    def request(self, tokenizer: Any, loras: Any) -> Request:
        """Return our request, in which the rows of all embeddings are numbered from 0."""
        rows = (e.first_index + i for e in self.embeddings for i in range(len(e.embeddings)))
        moved = dict(zip(rows, count(FIRST_EMBEDDING), strict=False))
        prompts: Any = tuple(tuple(moved.get(i, i) for i in ids) for ids in self.prompts)
        return self._request(
            prompts if len(prompts) > 1 else prompts[0],
            **self.sampling(tokenizer),
            embeddings=[e.embeddings for e in self.embeddings],
            adapters=adapters(loras),
        )

    def sampling(self, tokenizer: Any) -> dict[str, Any]:
        """Return the fields of our request that the settings determine."""
        settings, self._excluded = self.gen_settings.native(tokenizer)
        hooks = [partial(call_hook, hook) for hook in self.gen_settings.post_sampling_hooks]
        return {"settings": settings, "hooks": hooks, "excluded": self._excluded}

    def ban(self, ids: Iterable[int]) -> None:
        """Exclude these ids, and those of the settings, from the next sample on."""
        if self.native is not None:
            self.native.exclude(self._excluded.union(ids))

    @property
    def token_ids(self) -> list[list[int]]:
        """The prompts, each followed by the generated ids."""
        if self.native is None:
            return self.prompts
        healed, generated = self.native.prompt.healed is not None, self.native.output.ids
        return [[*ids[: len(ids) - healed], *generated] for ids in self.prompts]

    @property
    def sequences(self) -> list[SimpleNamespace]:
        """The same as objects with `input_ids`, a `SeqTensor`."""
        sequences = list[SimpleNamespace]()
        for ids in self.token_ids:
            sequences.append(SimpleNamespace(input_ids=SeqTensor((1, 0), torch.long, 1)))
            sequences[-1].input_ids.append(torch.tensor([ids]))
        return sequences


def _ids(ids: Any) -> list[int]:
    """Return the ids of a tensor (1, n) in main memory."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1 or not ids.numel():
        raise ConfigError("`input_ids` must be tensors (1, n) with at least one id")
    if ids.device.type != "cpu":
        raise ConfigError(f"`input_ids` are on `{ids.device}`; give `input_ids.cpu()`")
    return list(map(int, ids[0]))


class Jobs:
    """Jobs on the generator that a cache makes with some options, and their results."""

    def __init__(
        self,
        cache: ExLlamaV2Cache,
        tokenizer: ExLlamaV2Tokenizer,
        loras: Any = None,
        **options: Any,
    ) -> None:
        self.cache, self.tokenizer, self.loras, self._options = cache, tokenizer, loras, options
        self.jobs, self._serials = dict[ExLlamaV2DynamicJob, None](), count()  # in order
        self._events = deque[Event]()

    @property
    def native(self) -> Generator:
        return self.cache.generator(**self._options)

    pending_jobs = property(lambda self: [job for job in [*self.jobs] if not job.is_started])
    active_jobs = property(lambda self: [job for job in [*self.jobs] if job.is_started])

    def num_remaining_jobs(self) -> int:
        return len(self.jobs)

    def set_loras(self, loras: Any) -> None:
        if self.jobs:
            raise ConfigError(f"{len(self.jobs)} jobs run or wait; let them end first")
        self.loras = loras

    def add(self, job: ExLlamaV2DynamicJob, submit: Callable[[Request], Job] | None = None) -> int:
        """Put a job in the queue, by `submit` if its events are to go elsewhere."""
        submit = submit or partial(self.native.submit, deliver=self._events.append)
        request = job.request(self.tokenizer.native, self.loras)
        job.is_started, job.full_completion = False, ""  # also if it has run before
        self.jobs[job] = None  # before another thread can end it
        try:
            job.native = submit(request)
        except BaseException:
            self.jobs.pop(job, None)
            raise
        job.serial_number = next(self._serials)
        return job.serial_number

    def enqueue(self, job: Any) -> Any:
        """Put a job or a list of jobs in the queue; return its serial number, or theirs."""
        self.cache.end_stream()
        return [*map(self.add, job)] if isinstance(job, list) else self.add(job)

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job without another result; if it has ended, it stays as it is."""
        if job in self.jobs and job.native is not None:
            del self.jobs[job]
            if not job.native.is_done:
                self.native.cancel(job.native)

    def change(self, job: ExLlamaV2DynamicJob, stops: Iterable[int | str]) -> None:
        """Continue a job with these stops, and with its settings as they are now."""
        if job.native is not None and not job.native.is_done:
            fields = job.sampling(self.tokenizer.native)
            self.native.change(job.native, stops=[*stops], **fields)

    def clear_queue(self) -> None:
        for job in [*self.jobs]:
            self.cancel(job)

    def iterate(self) -> list[dict[str, Any]]:
        """Run a step of the generator, and return its results.

        Raises:
            Exl2FlowError: what ended a job; other calls return the results of the others.
        """
        if not self._events:
            self.native.step()
        results = list[dict[str, Any]]()
        while self._events and not (results and self._events[0].error):
            event = self._events.popleft()
            if event.tag in self.jobs:
                self.note(event)
                results += self.results(event)
        return results

    def note(self, event: Event) -> None:
        """Forget a job if this is its last event."""
        if event.reason is not None:
            self.jobs.pop(cast(ExLlamaV2DynamicJob, event.tag), None)

    def results(self, event: Event) -> list[dict[str, Any]]:
        """Return an event as a dict, or nothing if its job was cancelled; raise its error."""
        job: Any = event.tag
        if event.error is not None:
            raise event.error
        if event.reason == "cancelled":
            return []
        job.is_started, job.full_completion = True, job.full_completion + event.text
        result = {
            "job": job,
            "stage": STAGES[event.stage],
            "serial": job.serial_number,
            "eos": False,
            "identifier": job.identifier,
            "suppressed_text": event.suppressed_text or None,
            "suppressed_tokens": _tensor(event.suppressed_ids),
        } | _shown(event)
        if event.stage == "prompt":
            result |= {"curr_progress": event.read, "max_progress": event.total}
        result |= {} if event.statistics is None else self._end(job, event, event.statistics)
        return [{key: value for key, value in result.items() if value is not None}]

    def _end(self, job: ExLlamaV2DynamicJob, event: Event, s: Statistics) -> dict[str, Any]:
        stop, sequences = event.trigger, len(job.prompts)
        drafts = self._options.get("draft") is not None
        token = stop if isinstance(stop, int) else None
        decoded = None if token is None else self.tokenizer.native.decode([token], special=True)
        return {
            "eos": True,
            "eos_reason": event.reason,
            "held": _shown(event.held or TextPiece()),
            "eos_triggering_token_id": token,
            "eos_triggering_token_str": decoded,
            "eos_triggering_string": stop if token is None else None,
            "full_completion": job.full_completion,
            "new_tokens": s.new_tokens,
            "prompt_tokens": len(job.prompts[0]),
            "time_enqueued": s.waiting_seconds,
            "time_prefill": s.prompt_seconds,
            "time_generate": s.text_seconds,
            "cached_pages": s.cached_pages // sequences,
            "cached_tokens": s.cached_tokens // sequences,
            "accepted_draft_tokens": s.accepted_tokens if drafts else None,
            "rejected_draft_tokens": s.drafted_tokens - s.accepted_tokens if drafts else None,
        }

    def run(
        self, jobs: Sequence[ExLlamaV2DynamicJob], abort_event: threading.Event | None
    ) -> dict[ExLlamaV2DynamicJob, dict[str, Any]]:
        """Run jobs to their end, or until an abort, and return the last result of each."""
        last = dict[ExLlamaV2DynamicJob, dict[str, Any]]()
        try:
            self.enqueue([*jobs])
            while any(job in self.jobs for job in jobs):
                if abort_event is not None and abort_event.is_set():
                    break
                last |= {result["job"]: result for result in self.iterate()}
        finally:
            for job in jobs:
                self.cancel(job)
        return last


def _shown(piece: TextPiece) -> dict[str, Any]:
    """Return the text of a piece, and its tensors (1, n, …), if there are any."""
    fields = {
        "text": piece.text or None,
        "token_ids": _tensor(piece.ids),
        "token_probs": _tensor([p or 0.0 for p in piece.probabilities]),
        "top_k_tokens": _tensor(piece.top_ids),
        "top_k_probs": _tensor(piece.top_probabilities),
        "logits": _tensor([torch.as_tensor(x) for x in piece.logits]),
    }
    return {key: value for key, value in fields.items() if value is not None}


def _tensor(values: Sequence[Any]) -> torch.Tensor | None:
    """Return a tensor (1, n, …) of n values, None of none."""
    return torch.stack([torch.as_tensor(value) for value in values])[None] if values else None


def native_draft(
    model: ExLlamaV2 | None, ngram: int | None, tokens: int, least: float = 0.0
) -> Draft | NgramDraft | None:
    """Return our draft: by a model, by n-grams, whose length does not matter here, or none."""
    if ngram is not None:
        return NgramDraft(tokens=tokens)
    return None if model is None else Draft(model=model.native, tokens=tokens, least=least)


class ExLlamaV2DynamicGenerator(Jobs):
    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2Cache,
        tokenizer: ExLlamaV2Tokenizer,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_chunk_size: int | None = None,
        max_q_size: int = 8,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2Cache | None = None,
        num_draft_tokens: int = 4,
        use_ngram_draft: bool = False,
        max_ngram: int = 4,
        max_sampling_threads: int = 16,
        min_sampling_threads: int = 3,
        paged: bool = True,
        filter_background_eval: bool = True,
        **kwargs: Any,
    ) -> None:
        self.page_size = cache.page_tokens
        if cache.batch_size != 1 or cache.max_seq_len % self.page_size:
            sizes = f"{cache.batch_size} rows of {cache.max_seq_len} tokens"
            raise ConfigError(
                f"the cache has {sizes}; give it one, of a multiple of {self.page_size}"
            )
        if draft_model is not None and (draft_cache is None or use_ngram_draft):
            raise ConfigError("`draft_model` needs a `draft_cache`, and no `use_ngram_draft`")
        self.model, self.max_total_tokens = model, cache.tokens
        self.max_pages = cache.tokens // self.page_size
        ngram = max_ngram if use_ngram_draft else None
        slots = max_batch_size or model.config.max_input_len // max_q_size
        super().__init__(
            cache,
            tokenizer,
            slots=min(slots, self.max_pages),
            context=max_seq_len,
            chunk=max_chunk_size,
            draft=native_draft(draft_model, ngram, num_draft_tokens),
        )

    @property
    def all_pages(self) -> list[SimpleNamespace]:
        """The pages of the cache, as exllamav2 describes them."""
        return [
            SimpleNamespace(
                page_index=index,
                ref_count=page.users,
                phash=page.key or index.to_bytes(16),
                prev_hash=page.before or None,
                kv_position=len(page.ids),
                sequence=torch.tensor([page.ids], dtype=torch.long),
            )
            for index, page in enumerate(self.native.states.table.pages)
        ]

    def print_page_list(self, short: bool = True) -> None:
        for page in self.all_pages:
            shown = f"page {page.page_index}: {page.kv_position} tokens, {page.ref_count} users\n"
            sys.stdout.write(shown)

    def defrag_cache(self) -> None:
        """Do nothing: pages are read in any order."""

    validate_cache = defrag_cache

    def warmup(self) -> None:
        self.native.warmup()

    def reset_page_table(self) -> None:
        self.set_loras(self.loras)
        self.cache.drop()

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        seed: int | None = None,
        gen_settings: Settings | list[Settings] | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Iterable[int | str] | None = None,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        completion_only: bool = False,
        filters: Any = None,
        filter_prefer_eos: bool = False,
        return_last_results: bool = False,
        embeddings: Any = None,
        banned_strings: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the text of a prompt, or those of a list of prompts; None if it was aborted."""
        several = isinstance(prompt, list)
        prompts = prompt if several else [prompt]
        columns = [
            gen_settings if isinstance(gen_settings, list) else [gen_settings] * len(prompts)
        ]
        columns += [x if several and x else [x] * len(prompts) for x in (filters, embeddings)]
        if {len(prompts)} != set(map(len, columns)):
            what = "`gen_settings`, `filters` or `embeddings` has another length than"
            raise ConfigError(f"{what} {len(prompts)} prompts; give None where one has none")
        jobs, shown = list[ExLlamaV2DynamicJob](), list[str]()
        for text, settings, its_filters, its_embeddings in zip(prompts, *columns, strict=True):
            parts = text if isinstance(text, tuple) else (text,)
            more = add_bos, False, encode_special_tokens, False, its_embeddings
            ids = [self.tokenizer.encode(part, *more) for part in parts]
            job = ExLlamaV2DynamicJob(
                ids,
                max_new_tokens,
                min_new_tokens,
                gen_settings=settings,
                seed=None if seed is None else seed + len(jobs),
                stop_conditions=stop_conditions,
                decode_special_tokens=decode_special_tokens,
                token_healing=token_healing,
                filters=its_filters,
                filter_prefer_eos=filter_prefer_eos,
                embeddings=its_embeddings,
                banned_strings=banned_strings,
            )
            jobs.append(job)
            shown.append("" if completion_only else parts[0])
        last = self.run(jobs, abort_event)
        if abort_event is not None and abort_event.is_set():
            return self.clear_queue()
        texts = [text + job.full_completion for text, job in zip(shown, jobs, strict=True)]
        results: Any = texts, [last.get(job) for job in jobs]
        results = results if several else tuple(column[0] for column in results)
        return results if return_last_results else results[0]
