"""Log probabilities in the forms of both kinds of completion, and of vLLM for prompts."""

from collections.abc import Sequence
from typing import Any

from exl2flow.inference.generate import Event, PromptScores
from exl2flow.model import Tokenizer
from exl2flow.model.text.spelling import Spelling
from exl2flow.serve.mapping import log_of


class Names:
    """Texts and bytes of tokens. by_id: texts are `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = Spelling(tokenizer).of

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token, for a special one those of its name."""
        found = self._bytes[token] if token < len(self._bytes) else b""
        return found or (self._tokenizer.backend.id_to_token(token) or "").encode()

    def text(self, token: int, *, by_id: bool = False) -> str:
        """Return the text of a token, as far as it is whole characters."""
        return f"token_id:{token}" if by_id else self.bytes(token).decode("utf-8", "replace")

    def chat(self, event: Event, *, by_id: bool = False) -> list[dict[str, Any]]:
        """Return an entry per token of an event, as chat completions have them."""

        def entry(token: int, log: float) -> dict[str, Any]:
            text = self.text(token, by_id=by_id)
            return {"token": text, "logprob": log, "bytes": [*self.bytes(token)]}

        tops = [
            [entry(i, log_of(p)) for i, p in zip(ids, ps, strict=True)]
            for ids, ps in zip(event.top_ids, event.top_probabilities, strict=True)
        ]
        return [
            {**entry(token, log_of(p)), "top_logprobs": tops[at] if tops else []}
            for at, (token, p) in enumerate(zip(event.ids, event.probabilities, strict=False))
        ]

    def prompt(self, scores: PromptScores) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`: by position, id → log probability, rank and text."""
        found = list[dict[str, Any] | None]()
        for at, (token, log) in enumerate(zip(scores.ids, scores.logs, strict=True)):
            if log is None:
                found.append(None)
                continue
            tops = zip(scores.top_ids[at], scores.top_logs[at], strict=True) if at else ()
            ranked = {i: (v, rank) for rank, (i, v) in enumerate(tops, 1)}
            ranked.setdefault(token, (log, len(ranked) + 1))
            found.append(
                {
                    str(i): {"logprob": v, "rank": rank, "decoded_token": self.text(i)}
                    for i, (v, rank) in ranked.items()
                }
            )
        return found


class LogprobColumns:
    """The `logprobs` of one completion, which is a column per kind of value."""

    def __init__(self, names: Names, *, top: int, by_id: bool) -> None:
        self._names, self._top, self._by_id, self._offset = names, top, by_id, 0

    def of_prompt(self, scores: PromptScores) -> dict[str, Any]:
        """Return the columns of a prompt; its first token has no probability."""
        tops = [*zip(scores.top_ids, scores.top_logs, strict=True)] or [((), ())] * len(scores.ids)
        return self._columns(scores.ids, scores.logs, tops)

    def of_text(self, event: Event) -> dict[str, Any]:
        """Return the columns of what an event adds."""
        logs = [log_of(p) for p in event.probabilities]
        tops = [
            (ids, [log_of(p) for p in ps])
            for ids, ps in zip(event.top_ids, event.top_probabilities, strict=True)
        ]
        return self._columns(event.ids[: len(logs)], logs, tops or [((), ())] * len(logs))

    def _columns(
        self, ids: Sequence[int], logs: Sequence[float | None], tops: Sequence[Any]
    ) -> dict[str, Any]:
        texts = [self._names.text(i, by_id=self._by_id) for i in ids]
        offsets = list[int]()
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._names.text(token))
        return {
            "tokens": texts,
            "token_logprobs": [*logs],
            "top_logprobs": [self._best(*top) for top in tops],
            "text_offset": offsets,
        }

    def _best(self, ids: Sequence[int], logs: Sequence[float]) -> dict[str, float] | None:
        best = dict[str, float]()
        for token, log in [*zip(ids, logs, strict=True)][: self._top]:
            best.setdefault(self._names.text(token, by_id=self._by_id), log)
        return best or None


def joined(columns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return columns that follow each other as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for each in columns for value in each[name]] for name in names}
