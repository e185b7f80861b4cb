"""`ExLlamaV2DynamicGenerator`: many jobs at once, by the `Generator` of its cache."""

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from exl2flow.compat.exllamav2.cache import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator.job import ExLlamaV2DynamicJob, Queue, Settings
from exl2flow.compat.exllamav2.model import ExLlamaV2
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2flow.core.errors import ConfigError
from exl2flow.inference import Draft, NgramDraft
from exl2flow.kernels import PAGE_TOKENS


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
        draft: Draft | NgramDraft | None = None
        if draft_model is not None:
            draft = Draft(model=draft_model.native, tokens=num_draft_tokens, least=0.0)
            if draft_cache is None or use_ngram_draft:
                raise ConfigError("`draft_model` needs a `draft_cache`, and no `use_ngram_draft`")
        elif use_ngram_draft:
            draft = NgramDraft(tokens=num_draft_tokens, longest=max(max_ngram, 2))
        rows = max_batch_size or config.max_input_len // max_q_size
        self.queue = Queue(
            cache, tokenizer, slots=min(rows, self.max_pages), exact=True, draft=draft,
            context=max_seq_len or config.max_seq_len, chunk=max_chunk_size or config.max_input_len,
        )  # fmt: skip

    @property
    def pending_jobs(self) -> list[ExLlamaV2DynamicJob]:
        return [job for job in [*self.queue.jobs] if not job.is_started]

    @property
    def active_jobs(self) -> list[ExLlamaV2DynamicJob]:
        return [job for job in [*self.queue.jobs] if job.is_started]

    def num_remaining_jobs(self) -> int:
        return len(self.queue.jobs)

    def warmup(self) -> None:
        self.queue.make().warmup()

    def reset_page_table(self) -> None:
        self.set_loras(self.queue.loras)
        self.cache.drop()

    def set_loras(self, loras: Any) -> None:
        if self.queue.jobs:
            raise ConfigError(f"{len(self.queue.jobs)} jobs run or wait; let them end first")
        self.queue.loras = loras

    def enqueue(self, job: Any) -> Any:
        """Put a job or a list of jobs in the queue; return its serial number, or theirs."""
        self.cache.end_stream()
        return [*map(self.queue.add, job)] if isinstance(job, list) else self.queue.add(job)

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        self.queue.cancel(job)

    def iterate(self) -> list[dict[str, Any]]:
        return self.queue.iterate()

    def clear_queue(self) -> None:
        self.queue.cancel(*self.queue.jobs)
        self.queue.step()

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
            what = "`gen_settings`, `filters` or `embeddings` has another length than"
            raise ConfigError(f"{what} {len(prompts)} prompts; give None where one has none")
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
            while any(job in self.queue.jobs for job in jobs):
                last |= {result["job"]: result for result in self.iterate()}
                if abort_event is not None and abort_event.is_set():
                    return self.clear_queue()
        finally:
            self.queue.cancel(*jobs)
        texts = [text + job.full_completion for text, job in zip(shown, jobs, strict=True)]
        results = [last.get(job) for job in jobs]
        if not several:
            return (texts[0], results[0]) if return_last_results else texts[0]
        return (texts, results) if return_last_results else texts
