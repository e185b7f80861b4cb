"""Log probabilities in the forms of both kinds of completion, and of vLLM for prompts."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from exl2flow.engine.generate import Event, PromptScores
from exl2flow.engine.generate.event import TextPiece
from exl2flow.model import Tokenizer
from exl2flow.model.text.spelling import Spelling

LEAST = -9999.0  # that JSON readers bear; of impossible tokens
Ranked = Sequence[tuple[int, float]]  # likeliest ids and their log probabilities
Row = tuple[int, Any, Ranked]


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

        return [
            {**entry(token, log), "top_logprobs": [entry(*row) for row in best]}
            for token, log, best in rows_of(event)
        ]

    def columns(
        self, rows: Sequence[Row], offset: int, *, top: int, by_id: bool = False
    ) -> dict[str, list[Any]]:
        """Return the `logprobs` of a completion, whose text begins at an offset."""
        lengths = [len(self.text(token)) for token, _, _ in rows]
        # of tokens with the same text, the likeliest
        best = [[(self.text(i, by_id=by_id), log) for i, log in row[2][:top]] for row in rows]
        return {
            "tokens": [self.text(token, by_id=by_id) for token, _, _ in rows],
            "token_logprobs": [log for _, log, _ in rows],
            "top_logprobs": [dict(reversed(each)) or None for each in best],
            "text_offset": [*accumulate(lengths, initial=offset)][:-1],
        }

    def prompt(self, scores: PromptScores) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs`: by position, id → log probability, rank and text."""
        found = list[dict[str, Any] | None]()
        for token, log, best in rows_of_prompt(scores):
            ranked = [*best] + [(token, log)] * (token not in dict(best))
            row = {
                str(i): {"logprob": value, "rank": rank, "decoded_token": self.text(i)}
                for rank, (i, value) in enumerate(ranked, 1)
            }
            found.append(None if log is None else row)
        return found


def rows_of(event: TextPiece) -> list[Row]:
    """Return id, log probability and likeliest ids of each token of a text."""
    logs = [_log(p) for p in event.probabilities]
    best: list[Ranked] = [
        [(i, _log(p)) for i, p in zip(ids, ps, strict=True)]
        for ids, ps in zip(event.top_ids, event.top_probabilities, strict=True)
    ]
    return [*zip(event.ids, logs, best or [()] * len(logs), strict=False)]


def rows_of_prompt(scores: PromptScores) -> list[Row]:
    """Return the same of each token of a prompt; the first one has no probability."""
    tops = zip(scores.top_ids, scores.top_logs, strict=True)
    best: list[Ranked] = [[*zip(*row, strict=True)] for row in tops]
    return [*zip(scores.ids, scores.logs, best or [()] * len(scores.ids), strict=True)]


def _log(probability: float) -> float:
    return max(math.log(probability), LEAST) if probability > 0 else LEAST
