"""Collects the log probabilities of a prompt's tokens while the prompt is read."""

from collections.abc import Sequence

from exl2flow.engine.generate.event import PromptScores
from exl2flow.engine.sampling import OwnProbabilities


class PromptScorer:
    """Scores of a prompt, in the order of its tokens; a token may be read again after a preemption.

    known: leading tokens whose hidden states have been scored, each at the token after it; top:
    likeliest ids wanted; is_delivered: whether an event has brought the scores.
    """

    def __init__(self, ids: Sequence[int], top: int) -> None:
        self.known, self.top, self.is_delivered = 0, top, False
        self._ids, self._parts = tuple(ids), list[OwnProbabilities]()

    @property
    def is_complete(self) -> bool:
        """Whether all tokens but the first have their scores."""
        return self.known >= len(self._ids) - 1

    def next_ids(self, begin: int, end: int) -> tuple[int, ...]:
        """Return the tokens to score after reading positions `begin` to `end`.

        They follow the last of these positions that have not been scored.
        """
        return self._ids[max(begin, self.known) + 1 : end + 1]

    def add(self, scores: OwnProbabilities) -> None:
        """Take the scores of the next tokens, and begin to copy them to the host."""
        self.known += len(scores.logs)
        self._parts.append(scores.to_host())

    def scores(self) -> PromptScores | None:
        """Return the scores, once copied; None: logits were not finite."""
        parts, self._parts = self._parts, []
        if any(part.logs.isnan().any() for part in parts):
            return None
        logs, top_ids, top_logs = (
            [x for part in parts for x in part[column].tolist()] for column in range(3)
        )
        if not self.top:
            return PromptScores(ids=self._ids, logs=(None, *logs))
        return PromptScores(
            ids=self._ids,
            logs=(None, *logs),
            top_ids=((), *map(tuple, top_ids)),
            top_logs=((), *map(tuple, top_logs)),
        )
