"""`ExLlamaV2DynamicGenerator`: many jobs at once, by the `Generator` of its cache."""

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from exl2flow.compat.exllamav2.cache import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator.job import ExLlamaV2DynamicJob, Settings
from exl2flow.compat.exllamav2.model import ExLlamaV2, adapters
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2flow.core.errors import ConfigError
from exl2flow.inference import Draft, Event, Generator, NgramDraft
from exl2flow.kernels import PAGE_TOKENS

Result = dict[str, Any] | Exception  # what ended the job


class ExLlamaV2DynamicGenerator:
    page_size = PAGE_TOKENS

    def __init__(
        self, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer,
        max_batch_size: int | None = None, max_seq_len: int | None = None,
        max_chunk_size: int | None = None, max_q_size: int = 8,
        draft_model: ExLlamaV2 | None = None, draft_cache: ExLlamaV2Cache | None = None,
        num_draft_tokens: int = 4, use_ngram_draft: bool = False, max_ngram: int = 4,
        max_sampling_threads: int = 16, min_sampling_threads: int = 3, paged: bool = True,
        filter_background_eval: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        config = model.config
        if cache.batch_size != 1 or cache.max_seq_len % PAGE_TOKENS:
            sizes = f"{cache.batch_size} rows of {cache.max_seq_len} tokens"
            raise ConfigError(f"the cache has {sizes}; give it one, of a multiple of {PAGE_TOKENS}")
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.max_total_tokens, self.max_pages = cache.tokens, cache.tokens // PAGE_TOKENS
        self._draft: Any = None
        if draft_model is not None:
            self._draft = Draft(model=draft_model.native, tokens=num_draft_tokens, least=0.0)
        if use_ngram_draft:
            self._draft = NgramDraft(tokens=num_draft_tokens, longest=max_ngram)
        if draft_model is not None and (draft_cache is None or use_ngram_draft):
            raise ConfigError("`draft_model` needs a `draft_cache`, and no `use_ngram_draft`")
        rows = max_batch_size or config.max_input_len // max_q_size
        self._make = partial(
            cache.generator, slots=min(rows, self.max_pages), exact=True, draft=self._draft,
            context=max_seq_len or config.max_seq_len, chunk=max_chunk_size or config.max_input_len,
        )  # fmt: skip
        self._jobs = dict[ExLlamaV2DynamicJob, None]()  # in order
        self._found = list[tuple[ExLlamaV2DynamicJob, Result]]()
        self._serial, self._loras = 0, None

    @property
    def native(self) -> Generator:
        return self._make()

    @property
    def pending_jobs(self) -> list[ExLlamaV2DynamicJob]:
        return [job for job in [*self._jobs] if not job.is_started]

    @property
    def active_jobs(self) -> list[ExLlamaV2DynamicJob]:
        return [job for job in [*self._jobs] if job.is_started]

    def num_remaining_jobs(self) -> int:
        return len(self._jobs)

    def warmup(self) -> None:
        self.native.warmup()

    def reset_page_table(self) -> None:
        self._check_idle()
        self.cache.drop()

    def set_loras(self, loras: Any) -> None:
        self._check_idle()
        self._loras = loras

    def _check_idle(self) -> None:
        if self._jobs:
            raise ConfigError(f"{len(self._jobs)} jobs run or wait; let them end first")

    def enqueue(self, job: Any) -> Any:
        """Put a job or a list of jobs in the queue; return its serial number, or theirs."""
        if isinstance(job, list):
            return [self.enqueue(each) for each in job]
        request = job.request(self.tokenizer.native, adapters(self._loras))
        self._jobs[job], job.serial_number = None, self._serial
        self._serial += 1
        try:
            job.native = self.native.submit(request, deliver=partial(self._take, job))
        except Exception:
            del self._jobs[job]
            raise
        return job.serial_number

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job without another result; do nothing if it has ended."""
        if job in self._jobs and job.native is not None:
            del self._jobs[job]
            job.native.cancel()

    def clear_queue(self) -> None:
        for job in [*self._jobs]:
            self.cancel(job)
        self.step()

    def _take(self, job: ExLlamaV2DynamicJob, event: Event) -> None:
        """Note what happened to a job; it may have been cancelled."""
        is_open = job in self._jobs
        if event.reason is not None:
            self._jobs.pop(job, None)
        if is_open and event.reason != "cancelled":
            error = event.error
            drafts, native = self._draft is not None, self.tokenizer.native
            self._found.append((job, error or job.result(event, native, drafts)))

    def step(self) -> list[tuple[ExLlamaV2DynamicJob, Result]]:
        """Do a part of the work; return what happened, by job."""
        if self._serial:
            self.native.step()
        found, self._found = self._found, []
        return found

    def iterate(self) -> list[dict[str, Any]]:
        """Do a part of the work, and return its results.

        Raises:
            Exl2FlowError: what ended a job; the next call returns the other results.
        """
        found = self._found or self.step()
        self._found = []
        for index, (_, result) in enumerate(found):
            if isinstance(result, Exception):
                self._found = found[:index] + found[index + 1 :]
                raise result
        return [result for _, result in found if isinstance(result, dict)]

    def generate(
        self, prompt: Any, max_new_tokens: int, min_new_tokens: int = 0, seed: int | None = None,
        gen_settings: Settings | list[Settings] | None = None, token_healing: bool = False,
        encode_special_tokens: bool = False, decode_special_tokens: bool = False,
        stop_conditions: Iterable[int | str] | None = None, add_bos: bool = False,
        abort_event: threading.Event | None = None, completion_only: bool = False,
        filters: Any = None, filter_prefer_eos: bool = False, return_last_results: bool = False,
        embeddings: Any = None, banned_strings: Sequence[str] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return the text of a prompt, or those of a list of prompts; None if it was aborted."""
        several = isinstance(prompt, list)
        prompts = prompt if several else [prompt]
        given = gen_settings if isinstance(gen_settings, list) else [gen_settings] * len(prompts)
        each = [x if several and x else [x] * len(prompts) for x in (filters, embeddings)]
        if {len(prompts)} != set(map(len, (given, *each))):
            what = (
                f"`gen_settings`, `filters` or `embeddings` is not one per {len(prompts)} prompts"
            )
            raise ConfigError(f"{what}; give None where a prompt has none")
        jobs, shown = list[ExLlamaV2DynamicJob](), list[str]()
        for text, settings, its_filters, its_embeddings in zip(prompts, given, *each, strict=True):
            parts = text if isinstance(text, tuple) else (text,)
            encode = partial(
                self.tokenizer.encode, add_bos=add_bos, embeddings=its_embeddings,
                encode_special_tokens=encode_special_tokens,
            )  # fmt: skip
            job = ExLlamaV2DynamicJob(
                [*map(encode, parts)], max_new_tokens, min_new_tokens, gen_settings=settings,
                seed=None if seed is None else seed + len(jobs), stop_conditions=stop_conditions,
                decode_special_tokens=decode_special_tokens, token_healing=token_healing,
                filters=its_filters, filter_prefer_eos=filter_prefer_eos,
                embeddings=its_embeddings, banned_strings=banned_strings,
            )  # fmt: skip
            jobs.append(job)
            shown.append("" if completion_only else parts[0])
        last = dict[object, Any]()
        try:
            self.enqueue(jobs)
            while any(job in self._jobs for job in jobs) or self._found:
                last |= {result["job"]: result for result in self.iterate()}
                if abort_event is not None and abort_event.is_set():
                    return self.clear_queue()
        finally:
            for job in jobs:
                self.cancel(job)
        texts = [text + job.full_completion for text, job in zip(shown, jobs, strict=True)]
        results = [last[job] for job in jobs]
        if not several:
            return (texts[0], results[0]) if return_last_results else texts[0]
        return (texts, results) if return_last_results else texts
