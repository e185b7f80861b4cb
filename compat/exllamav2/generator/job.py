"""`ExLlamaV2DynamicJob`: exllamav2's arguments as our request, our events as its dicts."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any

import torch

from exl2flow.compat.exllamav2.generator.filters import native_filters
from exl2flow.compat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2flow.compat.exllamav2.tensors import SeqTensor
from exl2flow.core.errors import ConfigError
from exl2flow.core.request import FIRST_EMBEDDING, Request
from exl2flow.inference import Event, Job
from exl2flow.inference.generate.event import Piece
from exl2flow.model import Tokenizer

NAMES = ("token_ids", "token_probs", "top_k_tokens", "top_k_probs", "logits")
Settings = ExLlamaV2Sampler.Settings


class ExLlamaV2DynamicJob:
    """A text to generate; `native` is our job, once it is in a queue."""

    def __init__(
        self, input_ids: Any, max_new_tokens: int, min_new_tokens: int = 0,
        max_skips: int | None = 4, gen_settings: Settings | None = None, seed: int | None = None,
        stop_conditions: Iterable[int | str] | None = None, decode_special_tokens: bool = False,
        return_top_tokens: int = 0, return_logits: bool = False, return_probs: bool = False,
        filters: Iterable[Any] | None = None, filter_prefer_eos: bool = False,
        token_healing: bool = False, identifier: object = None,
        banned_strings: Sequence[str] | None = None, embeddings: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        given = [input_ids] if isinstance(input_ids, torch.Tensor) else input_ids
        self._prompts = [ids_of(ids) for ids in given]
        self.max_new_tokens, self.identifier = max_new_tokens, identifier
        self.gen_settings = Settings() if gen_settings is None else gen_settings
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "seed": seed,
            "max_skips": max_skips, "stops": list(stop_conditions or ()), "heal": token_healing,
            "decode_special": decode_special_tokens, "top_tokens": return_top_tokens,
            "logits": return_logits, "probabilities": return_probs, "filters": filters,
            "banned_strings": banned_strings or (), "prefer_end": filter_prefer_eos,
            "embeddings": embeddings or (),
        }  # fmt: skip
        self.native: Job | None = None
        self.serial_number: int | None = None
        self.is_started, self.full_completion = False, ""

    def request(self, tokenizer: Tokenizer, adapters: tuple[Any, ...]) -> Request:
        more = self._options | {"adapters": adapters}
        return request_of(self._prompts, self.gen_settings, tokenizer, **more)

    @property
    def sequences(self) -> list[SimpleNamespace]:
        """The sequences, each with its `input_ids`: prompt and text."""
        job = self.native
        made, cut = (job.output.ids, job.prompt.healed is not None) if job else ([], 0)
        found = [SimpleNamespace(input_ids=SeqTensor((1, 0), torch.long, 1)) for _ in self._prompts]
        for each, ids in zip(found, self._prompts, strict=True):
            each.input_ids.append(torch.tensor([[*ids[: len(ids) - cut], *made]]))
        return found

    def result(self, event: Event, tokenizer: Tokenizer, drafts: bool) -> dict[str, Any]:
        """Return an event as a dict."""
        found: dict[str, Any] = {
            "job": self,
            "stage": event.stage,
            "eos": False,
            "serial": self.serial_number,
        }
        if self.identifier is not None:
            found["identifier"] = self.identifier
        if event.stage == "started":
            self.is_started = True
            return found
        if event.stage == "prompt":
            progress = {"curr_progress": event.read, "max_progress": event.total}
            return found | {"stage": "prefill"} | progress
        self.full_completion += event.text
        found |= {"stage": "streaming"} | shown(event)
        if event.suppressed_ids:
            found["suppressed_text"] = event.suppressed_text
            found["suppressed_tokens"] = torch.tensor([event.suppressed_ids])
        return found if event.reason is None else found | self._end(event, tokenizer, drafts)

    def _end(self, event: Event, tokenizer: Tokenizer, drafts: bool) -> dict[str, Any]:
        s, rows, stop = event.statistics, len(self._prompts), event.trigger
        assert s is not None
        found: dict[str, Any] = {
            "eos": True, "eos_reason": event.reason, "held": shown(event.held or Piece()),
            "full_completion": self.full_completion, "new_tokens": s.new_tokens,
            "prompt_tokens": s.prompt_tokens // rows, "time_enqueued": s.waiting_seconds,
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


def ids_of(ids: Any) -> list[int]:
    """Return the ids of a tensor (1, n) in main memory."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1 or not ids.numel():
        raise ConfigError("`input_ids` must be tensors (1, n) with at least one id")
    if ids.device.type != "cpu":
        raise ConfigError(f"`input_ids` are on `{ids.device}`; give `input_ids.cpu()`")
    return list(map(int, ids[0]))


class ExLlamaV2MMEmbedding:
    """Embeddings (n, hidden) in place of tokens; `text_alias` stands for them in texts."""

    _first = count(FIRST_EMBEDDING, 1_000_000)  # of the next one

    def __init__(
        self, model: Any, embeddings: torch.Tensor, text_alias: str | None = None,
        thw_grid: Any = None, pre_tokens: int = 0, post_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.embeddings, self.thw_grid = model, embeddings.flatten(0, -2), thw_grid
        self.first_index, self.pre_tokens, self.post_tokens = (
            next(self._first),
            pre_tokens,
            post_tokens,
        )
        self.last_index = self.first_index + len(self.embeddings)
        self.text_alias = text_alias or f"<$EMB_{self.first_index}$>"


def request_of(
    prompts: Sequence[Any], settings: Settings, tokenizer: Tokenizer, *, filters: Any = None,
    prefer_end: bool = False, embeddings: Sequence[Any] = (), **options: Any,
) -> Request:  # fmt: skip
    """Return a request for a prompt, or for the two of a pair."""
    ours, masks, hooks = settings.native(tokenizer)
    given = native_filters(filters)
    if embeddings:  # theirs are numbered by object, ours by request
        first = accumulate((len(e.embeddings) for e in embeddings), initial=FIRST_EMBEDDING)
        moved = {e.first_index + i: start + i for e, start in zip(embeddings, first, strict=False)
                 for i in range(len(e.embeddings))}  # fmt: skip
        prompts = [[moved.get(i, i) for i in ids] for ids in prompts]
        options["embeddings"] = [e.embeddings for e in embeddings]
    if not options.get("adapters"):
        options.pop("adapters", None)
    return Request(
        tuple(prompts) if len(prompts) > 1 else prompts[0],
        settings=ours, hooks=hooks, filters=[*given, *masks],
        prefer_end=prefer_end and bool(given), **options,
    )  # fmt: skip


def shown(piece: Piece, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Return what a piece has: `text`, and tensors (1, n, …) by these names."""
    found: dict[str, Any] = {"text": piece.text} if piece.text else {}
    probabilities = tuple(p or 0.0 for p in piece.probabilities)
    lists = (piece.ids, probabilities, piece.top_ids, piece.top_probabilities)
    made = zip(names, lists, strict=False)
    found |= {name: torch.tensor([values]) for name, values in made if values}
    if piece.logits:
        found[names[-1]] = torch.stack([torch.as_tensor(x) for x in piece.logits])[None]
    return found
