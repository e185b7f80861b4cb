"""`ExLlamaV2StreamingGenerator`: one text, a token per call."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from exl2flow.compat.exllamav2.generator.base import ExLlamaV2BaseGenerator
from exl2flow.compat.exllamav2.generator.dynamic import ExLlamaV2DynamicJob, Settings, native_draft
from exl2flow.compat.exllamav2.tensors import are_same, unpadded
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2MMEmbedding
from exl2flow.core.errors import ConfigError, ContextOverflow
from exl2flow.core.requests.request import FIRST_EMBEDDING

COLUMNS = {
    "token_ids": "chunk_token_ids",
    "token_probs": "probs",
    "top_k_tokens": "top_tokens",
    "top_k_probs": "top_probs",
    "logits": "logits",
}
NAMES = COLUMNS | {"suppressed_text": "suppressed"}


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    speculative_ngram, speculative_prob_threshold = False, 0.25
    speculative_ngram_min, speculative_ngram_max = 1, 5
    speculative_ngram_max_inf, speculative_ngram_threshold = 3, 1

    def __init__(
        self,
        model: Any,
        cache: Any,
        tokenizer: Any,
        draft_model: Any = None,
        draft_cache: Any = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        super().__init__(model, cache, tokenizer)
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.num_speculative_tokens = num_speculative_tokens
        eos = self.tokenizer.eos_token_id
        self.set_stop_conditions([] if eos is None else [eos])
        self._results, self._sums = deque[dict[str, Any]](), [0, 0, 0]

    def set_stop_conditions(self, stop_conditions: Iterable[int | str]) -> None:
        stops = list(stop_conditions)
        self.stop_tokens = {stop for stop in stops if isinstance(stop, int)}
        self.stop_strings = set(stops) - self.stop_tokens

    def begin_stream_ex(
        self,
        input_ids: torch.Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: torch.Tensor | None = None,
        position_offsets: torch.Tensor | None = None,
        return_probabilities: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        abort_event: Any = None,
        input_embeddings: torch.Tensor | None = None,
        decode_special_tokens: bool = False,
        banned_strings: Sequence[str] | None = None,
        filters: Any = None,
        filter_prefer_eos: bool = False,
        **kwargs: Any,
    ) -> None:
        """Continue ids (b, n); offsets or mask say how far the rows of a pair are padded."""
        rows = unpadded(input_ids.tolist(), input_mask, position_offsets)
        embeddings = list[ExLlamaV2MMEmbedding]()
        if input_embeddings is not None:
            rows, embeddings = _embedded(rows, input_embeddings)
        self._results, self.abort_event = deque(), abort_event
        job = ExLlamaV2DynamicJob(
            [torch.tensor([row]) for row in rows],
            None,
            gen_settings=gen_settings,
            stop_conditions=self._stops,
            embeddings=embeddings,
            decode_special_tokens=decode_special_tokens,
            return_top_tokens=return_top_tokens,
            return_logits=return_logits,
            return_probs=return_probabilities,
            filters=filters,
            filter_prefer_eos=filter_prefer_eos,
            banned_strings=banned_strings,
            token_healing=token_healing,
        )
        ngram = self.speculative_ngram_max if self.speculative_ngram else None
        tokens, least = self.num_speculative_tokens, self.speculative_prob_threshold
        draft = native_draft(self.draft_model, ngram, tokens, least)
        self._sums = self._counts()
        self._jobs, self._stream = [job], self._begin(len(rows), loras, draft)
        self._stream.add(job)
        self._empty = _empty(
            self.model.native.spec.head.out_features if return_logits else 0,
            top=return_top_tokens,
            has_probabilities=return_probabilities,
        )
        self._is_healing = job.native is not None and job.native.prompt.healed is not None
        self._seen, self._banned = self._values(gen_settings), frozenset[int]()

    def begin_stream(
        self,
        input_ids: torch.Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: Any = None,
        input_mask: torch.Tensor | None = None,
        position_offsets: torch.Tensor | None = None,
        abort_event: Any = None,
        **kwargs: Any,
    ) -> None:
        """Do what `begin_stream_ex` does, with fewer arguments by position."""
        self.begin_stream_ex(
            input_ids,
            gen_settings,
            token_healing,
            loras,
            input_mask,
            position_offsets,
            abort_event=abort_event,
            **kwargs,
        )

    @property
    def _stops(self) -> set[int | str]:
        return {*self.stop_tokens, *self.stop_strings}

    def _values(self, settings: Settings) -> dict[str, Any]:
        """Return copies of the settings and stops, which a program may change at any time."""
        return settings.values() | {"stop_conditions": self._stops}

    def _update(self, job: ExLlamaV2DynamicJob, banned: frozenset[int]) -> None:
        """Apply settings, stops and bans that the program changed since the last call."""
        values, seen = self._values(job.gen_settings), self._seen
        has_changed = any(not are_same(seen.get(name), value) for name, value in values.items())
        if has_changed:
            self._stream.change(job, self._stops)
        if banned != self._banned or (banned and has_changed):
            job.ban(banned)
        self._seen, self._banned = values, banned

    def stream_ex(self, ban_tokens: Iterable[int] | None = None) -> dict[str, Any]:
        """Run until the text grows, and return the new text and tokens, perhaps none."""
        if not self._jobs:
            raise ConfigError("no text is begun; call `begin_stream_ex` first")
        [job] = self._jobs
        before = len(job.token_ids[0])
        if job in self._stream.jobs and not self._results:
            self._update(job, frozenset(ban_tokens or ()))
        while self._stream.jobs and not self._results and len(job.token_ids[0]) == before:
            if self.abort_event is not None and self.abort_event.is_set():
                self._stream.cancel(job)
            results = self._stream.iterate()
            self._results += [result for result in results if result["stage"] == "streaming"]
        if not self._results and not self._stream.jobs and self.full():
            raise ContextOverflow(f"the text has all {self.max_tokens} tokens; begin another one")
        result = self._results.popleft() if self._results else {}
        ended = not (self._stream.jobs or self._results)
        if result.get("eos_reason") == "stop_string" and "token_ids" in result["held"]:
            count = result["held"]["token_ids"].shape[1]
            result |= {name: result[name][:, :-count] for name in COLUMNS if name in result}
        if self._is_healing and "token_ids" in result:  # the prompt has the healed token
            result |= {name: result[name][:, 1:] for name in COLUMNS if name in result}
            self._is_healing = False
        self.cache.texts[0] = job.token_ids[0]
        self.cache.current_seq_len = len(self.cache.texts[0]) - 1
        return {
            "chunk": result.get("text", ""),
            "eos": ended and result.get("eos_reason") != "max_new_tokens",
            **self._empty,
        } | {theirs: result[name] for name, theirs in NAMES.items() if name in result}

    def stream(self, ban_tokens: Iterable[int] | None = None) -> tuple[Any, ...]:
        """Return text, whether it has ended, ids (1, n), probabilities (1, n), logits (n, v).

        The last two are left out unless they were requested.
        """
        result = self.stream_ex(ban_tokens)
        result |= {"logits": result["logits"][0]} if "logits" in result else {}
        names = ("chunk", "eos", "chunk_token_ids", "probs", "logits")
        return tuple(result[name] for name in names if name in result)

    def ngram_preload(self, input_ids: torch.Tensor) -> None:
        """Do nothing: drafts look at the text itself."""

    def _counts(self) -> list[int]:
        statistics = [job.native.statistics() for job in self._jobs if job.native is not None]
        columns = [(s.new_tokens, s.drafted_tokens, s.accepted_tokens) for s in statistics]
        return [sum(column) for column in zip(self._sums, *columns, strict=True)]

    def reset_sd_stats(self) -> None:
        self._sums = [s - count for s, count in zip(self._sums, self._counts(), strict=True)]

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Return accepted / all, accepted / drafted, and the counts: all, drafted, accepted."""
        total, drafted, accepted = self._counts()
        return accepted / max(total, 1), accepted / max(drafted, 1), total, drafted, accepted


def _empty(width: int, *, top: int, has_probabilities: bool) -> dict[str, torch.Tensor]:
    """Return the requested tensors of a call that shows no token."""
    tensors = {"chunk_token_ids": torch.empty(1, 0, dtype=torch.long)}
    if has_probabilities:
        tensors["probs"] = torch.empty(1, 0)
    if top:
        tensors["top_tokens"] = torch.empty(1, 0, top, dtype=torch.long)
        tensors["top_probs"] = torch.empty(1, 0, top)
    if width:
        tensors["logits"] = torch.empty(1, 0, width)
    return tensors


def _embedded(
    rows: list[list[int]], tensor: torch.Tensor
) -> tuple[list[list[int]], list[ExLlamaV2MMEmbedding]]:
    """Return rows whose ids index the rows of a tensor (1 or b, n, hidden), and its embeddings."""
    embedding, count = ExLlamaV2MMEmbedding(None, tensor), tensor.shape[-2]
    embedding.first_index = FIRST_EMBEDDING
    starts = [count * index % len(embedding.embeddings) for index in range(len(rows))]
    moved = [
        [token + start if token >= FIRST_EMBEDDING else token for token in row]
        for row, start in zip(rows, starts, strict=True)
    ]
    return moved, [embedding]
