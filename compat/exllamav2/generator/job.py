"""`ExLlamaV2DynamicJob`, its results, and queues of jobs: what all generators are made of."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from exl2flow.compat.exllamav2.cache import ExLlamaV2Cache
from exl2flow.compat.exllamav2.generator.filters import native_filters
from exl2flow.compat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2flow.compat.exllamav2.model import adapters
from exl2flow.compat.exllamav2.tensors import SeqTensor
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2flow.core.errors import ConfigError
from exl2flow.core.request import FIRST_EMBEDDING, Request
from exl2flow.inference import Event, Job
from exl2flow.inference.generate.event import Piece

Settings = ExLlamaV2Sampler.Settings
Result = dict[str, Any] | Exception  # what ended the job


class ExLlamaV2DynamicJob:
    """A text to generate; `native` is our job, once it is in a queue."""

    def __init__(
        self, input_ids: Any, max_new_tokens: Any, min_new_tokens: int = 0,
        max_skips: int | None = 4, gen_settings: Settings | None = None, seed: int | None = None,
        stop_conditions: Iterable[int | str] | None = None, decode_special_tokens: bool = False,
        return_top_tokens: int = 0, return_logits: bool = False, return_probs: bool = False,
        filters: Iterable[Any] | None = None, filter_prefer_eos: bool = False,
        token_healing: bool = False, identifier: object = None,
        banned_strings: Sequence[str] | None = None, embeddings: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        given = [input_ids] if isinstance(input_ids, torch.Tensor) else input_ids
        self._prompts, self._embeddings = [_ids(each) for each in given], embeddings or ()
        self.max_new_tokens, self.identifier = max_new_tokens, identifier
        self.gen_settings = Settings() if gen_settings is None else gen_settings
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "seed": seed,
            "max_skips": max_skips, "stops": list(stop_conditions or ()), "heal": token_healing,
            "decode_special": decode_special_tokens, "top_tokens": return_top_tokens,
            "logits": return_logits, "probabilities": return_probs,
            "banned_strings": banned_strings or (), "filters": native_filters(filters),
            "prefer_end": filter_prefer_eos and bool(filters),
        }  # fmt: skip
        self.native: Job | None = None
        self.serial_number: int | None = None
        self.is_started, self.full_completion = False, ""

    def request(self, tokenizer: Any, loras: Any) -> Request:
        """Return our request, in which the rows of all embeddings are numbered from 0."""
        settings, masks, hooks = self.gen_settings.native(tokenizer)
        given, lengths = self._embeddings, [len(each.embeddings) for each in self._embeddings]
        pairs = zip(given, accumulate(lengths, initial=FIRST_EMBEDDING), strict=False)
        moved = {e.first_index + i: at + i for e, at in pairs for i in range(len(e.embeddings))}
        prompts = tuple([moved.get(i, i) for i in ids] if moved else ids for ids in self._prompts)
        more = self._options | {"filters": [*self._options["filters"], *masks]}
        return Request(
            prompts if len(prompts) > 1 else prompts[0], settings=settings, hooks=hooks,  # type: ignore[arg-type]
            embeddings=[each.embeddings for each in given], adapters=adapters(loras), **more,
        )  # fmt: skip

    @property
    def sequences(self) -> list[SimpleNamespace]:
        """The sequences, each with its `input_ids`: prompt and text."""
        job = self.native
        made, cut = (job.output.ids, job.prompt.healed is not None) if job else ([], 0)
        found = [SimpleNamespace(input_ids=SeqTensor((1, 0), torch.long, 1)) for _ in self._prompts]
        for each, ids in zip(found, self._prompts, strict=True):
            each.input_ids.append(torch.tensor([[*ids[: len(ids) - cut], *made]]))
        return found

    def result(self, event: Event, tokenizer: Any, drafts: bool) -> dict[str, Any]:
        """Return an event as a dict."""
        found: dict[str, Any] = {"job": self, "stage": event.stage, "serial": self.serial_number}
        found |= {"eos": False} | (
            {} if self.identifier is None else {"identifier": self.identifier}
        )
        if event.stage == "started":
            self.is_started = True
        elif event.stage == "prompt":
            found |= {"stage": "prefill", "curr_progress": event.read, "max_progress": event.total}
        else:
            self.full_completion += event.text
            found |= {"stage": "streaming"} | _shown(event)
        if event.suppressed_ids:
            found["suppressed_text"] = event.suppressed_text
            found["suppressed_tokens"] = torch.tensor([event.suppressed_ids])
        s, rows, stop = event.statistics, len(self._prompts), event.trigger
        if event.reason is None or s is None:
            return found
        found |= {
            "eos": True, "eos_reason": event.reason, "held": _shown(event.held or Piece()),
            "full_completion": self.full_completion, "new_tokens": s.new_tokens,
            "prompt_tokens": len(self._prompts[0]), "time_enqueued": s.waiting_seconds,
            "time_prefill": s.prompt_seconds, "time_generate": s.text_seconds,
            "cached_pages": s.cached_pages // rows, "cached_tokens": s.cached_tokens // rows,
        }  # fmt: skip
        if isinstance(stop, str):
            found["eos_triggering_string"] = stop
        elif stop is not None:
            found["eos_triggering_token_id"] = stop
            found["eos_triggering_token_str"] = tokenizer.decode([stop], special=True)
        if drafts:
            found["accepted_draft_tokens"] = s.accepted_tokens
            found["rejected_draft_tokens"] = s.drafted_tokens - s.accepted_tokens
        return found


def _ids(ids: Any) -> list[int]:
    """Return the ids of a tensor (1, n) in main memory."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1 or not ids.numel():
        raise ConfigError("`input_ids` must be tensors (1, n) with at least one id")
    if ids.device.type != "cpu":
        raise ConfigError(f"`input_ids` are on `{ids.device}`; give `input_ids.cpu()`")
    return list(map(int, ids[0]))


def _shown(piece: Piece) -> dict[str, Any]:
    """Return what a piece has: its text, and tensors (1, n, …)."""
    lists = {
        "token_ids": piece.ids, "token_probs": tuple(p or 0.0 for p in piece.probabilities),
        "top_k_tokens": piece.top_ids, "top_k_probs": piece.top_probabilities,
    }  # fmt: skip
    found: dict[str, Any] = {name: torch.tensor([x]) for name, x in lists.items() if x}
    if piece.logits:
        found["logits"] = torch.stack([torch.as_tensor(x) for x in piece.logits])[None]
    return found | ({"text": piece.text} if piece.text else {})


class Queue:
    """Jobs for the generator of a cache with some options, and their results."""

    def __init__(
        self, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer, **options: Any
    ) -> None:
        self.make, self.tokenizer, self.loras = partial(cache.generator, **options), tokenizer, None
        self.jobs, self._serial = dict[ExLlamaV2DynamicJob, None](), 0  # in order
        self._drafts = options.get("draft") is not None
        self._found = list[tuple[ExLlamaV2DynamicJob, Result]]()

    def add(self, job: ExLlamaV2DynamicJob) -> int:
        request = job.request(self.tokenizer.native, self.loras)
        self.jobs[job], job.serial_number = None, self._serial
        self._serial += 1
        try:
            job.native = self.make().submit(request, deliver=partial(self._take, job))
        except Exception:
            del self.jobs[job]
            raise
        return job.serial_number

    def cancel(self, *jobs: ExLlamaV2DynamicJob) -> None:
        """End jobs without another result; those that have ended stay as they are."""
        for job in jobs:
            if job in self.jobs and job.native is not None:
                del self.jobs[job]
                job.native.cancel()

    def _take(self, job: ExLlamaV2DynamicJob, event: Event) -> None:
        is_open = job in self.jobs
        if event.reason is not None:
            self.jobs.pop(job, None)
        result = job.result(event, self.tokenizer.native, self._drafts)
        if is_open and event.reason != "cancelled":
            self._found.append((job, event.error or result))

    def step(self) -> list[tuple[ExLlamaV2DynamicJob, Result]]:
        """Do a part of the work; return what happened, by job."""
        if self._serial:
            self.make().step()
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
