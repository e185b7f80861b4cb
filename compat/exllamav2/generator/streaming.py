"""`ExLlamaV2StreamingGenerator`: one text, a token per call."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from exl2flow.compat.exllamav2.generator.base import ExLlamaV2BaseGenerator
from exl2flow.compat.exllamav2.generator.job import Settings, request_of, shown
from exl2flow.compat.exllamav2.generator.sampler import Mask
from exl2flow.compat.exllamav2.model import adapters
from exl2flow.core.errors import ConfigError, ContextOverflow
from exl2flow.inference import Draft, Event, NgramDraft

NAMES = ("chunk_token_ids", "probs", "top_tokens", "top_probs", "logits")


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    speculative_ngram, speculative_prob_threshold = False, 0.25
    speculative_ngram_min, speculative_ngram_max = 1, 5
    speculative_ngram_max_inf, speculative_ngram_threshold = 3, 1

    def __init__(
        self, model: Any, cache: Any, tokenizer: Any, draft_model: Any = None,
        draft_cache: Any = None, num_speculative_tokens: int = 5,
    ) -> None:  # fmt: skip
        super().__init__(model, cache, tokenizer)
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.num_speculative_tokens = num_speculative_tokens
        eos = self.tokenizer.eos_token_id
        self.set_stop_conditions([] if eos is None else [eos])
        self._events, self._mask, self._sums = deque[Event](), Mask(), [0, 0, 0]

    def set_stop_conditions(self, stop_conditions: Iterable[int | str]) -> None:
        stops = list(stop_conditions)
        self.stop_tokens = {stop for stop in stops if isinstance(stop, int)}
        self.stop_strings = set(stops) - self.stop_tokens

    def begin_stream_ex(
        self, input_ids: torch.Tensor, gen_settings: Settings, token_healing: bool = False,
        loras: Any = None, input_mask: torch.Tensor | None = None,
        position_offsets: torch.Tensor | None = None, return_probabilities: bool = False,
        return_top_tokens: int = 0, return_logits: bool = False, abort_event: Any = None,
        input_embeddings: torch.Tensor | None = None, decode_special_tokens: bool = False,
        banned_strings: Sequence[str] | None = None, filters: Any = None,
        filter_prefer_eos: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Begin a text behind ids (b, n); of a pair padded on the left, offsets or mask tell it."""
        pads = [0] * len(input_ids)
        if position_offsets is not None:
            pads = [-int(offset) for offset in position_offsets.flatten()]
        elif input_mask is not None:
            pads = (input_mask < 0).sum(-1).tolist()
        rows = [row[pad:].tolist() for row, pad in zip(input_ids, pads, strict=True)]
        request = request_of(
            rows, gen_settings, self.tokenizer.native, heal=token_healing,
            adapters=adapters(loras), probabilities=return_probabilities,
            top_tokens=return_top_tokens, logits=return_logits, filters=filters,
            prefer_end=filter_prefer_eos, decode_special=decode_special_tokens,
            banned_strings=banned_strings or (), stops=[*self.stop_tokens, *self.stop_strings],
        )  # fmt: skip
        given = [] if input_embeddings is None else [*input_embeddings]
        self._mask, self._events = Mask(), deque()
        request = replace(request, filters=[*request.filters, self._mask], embeddings=given)
        self._sums = self._counts()
        draft: Any = None
        if self.speculative_ngram:
            draft = NgramDraft(
                tokens=self.num_speculative_tokens, longest=self.speculative_ngram_max
            )
        elif self.draft_model is not None:
            draft = Draft(
                model=self.draft_model.native, tokens=self.num_speculative_tokens,
                least=self.speculative_prob_threshold,
            )  # fmt: skip
        engine = self.native(len(rows), draft)
        for job in self._jobs:
            job.cancel()
        self._engine, self.abort_event = engine, abort_event
        self._jobs = [engine.submit(request, deliver=self._events.append)]

    begin_stream = begin_stream_ex

    def stream_ex(self, ban_tokens: Iterable[int] | None = None) -> dict[str, Any]:
        """Return what another step adds: perhaps no text, if more is to come."""
        if not self._jobs:
            raise ConfigError("no text is begun; call `begin_stream_ex` first")
        [job] = self._jobs
        self._mask.ids, before = frozenset(ban_tokens or ()), len(job.output.ids)
        while not (self._events or job.is_done) and len(job.output.ids) == before:
            if self.abort_event is not None and self.abort_event.is_set():
                job.cancel()
            self._engine.step()
            while self._events and self._events[0].stage != "text":
                self._events.popleft()
        if job.is_done and not self._events and self.full():
            raise ContextOverflow(f"the text has all {self.reach} tokens; begin another one")
        event = self._events.popleft() if self._events else Event(stage="text")
        if event.error is not None:
            raise event.error
        if event.reason == "stop_string" and event.held is not None:
            event = _cut(event, len(event.ids) - len(event.held.ids))
        ended = job.is_done and not self._events and event.reason != "max_new_tokens"
        found = {"chunk": event.text, "eos": ended, NAMES[0]: torch.empty(1, 0, dtype=torch.long)}
        found |= {name: x for name, x in shown(event, NAMES).items() if name != "text"}
        return found | ({"suppressed": event.suppressed_text} if event.suppressed_ids else {})

    def stream(self, ban_tokens: Iterable[int] | None = None) -> tuple[Any, ...]:
        """Return text, whether it ends, ids, and probabilities and logits where they are wanted."""
        found = self.stream_ex(ban_tokens)
        names = ("chunk", "eos", "chunk_token_ids", "probs", "logits")
        return tuple(found[name] for name in names if name in found)

    def ngram_preload(self, input_ids: torch.Tensor) -> None:
        """Do nothing: drafts look at the text itself."""

    def _counts(self) -> list[int]:
        every = [job.statistics() for job in self._jobs]
        columns = [(s.new_tokens, s.drafted_tokens, s.accepted_tokens) for s in every]
        return [sum(column) for column in zip(self._sums, *columns, strict=True)]

    def reset_sd_stats(self) -> None:
        self._sums = [0, 0, 0]
        self._sums = [-count for count in self._counts()]

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Return accepted / all, accepted / drafted, and the counts: all, drafted, accepted."""
        total, drafted, accepted = self._counts()
        return accepted / max(total, 1), accepted / max(drafted, 1), total, drafted, accepted


def _cut(event: Event, count: int) -> Event:
    """Return an event with its first tokens only."""
    names = ("ids", "probabilities", "top_ids", "top_probabilities", "logits")
    return replace(event, **{name: getattr(event, name)[:count] for name in names})
