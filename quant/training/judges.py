"""Rows of several texts that judge a training: better on average, and on none of them worse."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

ERRORS = 2.0  # standard errors of a mean difference beyond which it counts


@dataclass(frozen=True, slots=True)
class Judges:
    """Text → rows that were not trained on, int64 (rows, t)."""

    texts: Mapping[str, torch.Tensor]
    judgements: list[list[float]] = field(default_factory=list)  # nats per token, by row

    @property
    def rows(self) -> torch.Tensor:
        """All rows, int64 (rows, t)."""
        return torch.cat([*self.texts.values()])

    def scores(self) -> list[float]:
        """Return of each judgement the mean over texts of KL over the first KL.

        Infinite if it is worse on a text.
        """
        return [math.inf if self.worse(i) else self._score(i) for i in range(len(self.judgements))]

    @property
    def best(self) -> int:
        """The judgement with the lowest score, the first of several."""
        scores = self.scores()
        return scores.index(min(scores))

    def worse(self, judgement: int) -> list[str]:
        """Return the texts on which a judgement is worse than the first beyond the interval."""
        found = []
        for text, first in self._by_text(0).items():
            change = self._by_text(judgement)[text] - first
            error = change.std(ddof=1) / math.sqrt(len(change)) if len(change) > 1 else 0.0
            if not change.mean() <= ERRORS * error:  # nor NaN
                found.append(text)
        return found

    def mean(self, judgement: int) -> float:
        """Return the mean KL divergence of all rows."""
        return float(np.mean(self.judgements[judgement]))

    def means(self, judgement: int) -> dict[str, float]:
        """Return text → mean KL divergence of its rows."""
        return {text: float(rows.mean()) for text, rows in self._by_text(judgement).items()}

    def in_words(self, judgement: int) -> str:
        """Return text by text the divergence before and at a judgement."""
        first, now = self.means(0), self.means(judgement)
        return ", ".join(f"{text} {first[text]:.4f} -> {now[text]:.4f}" for text in now)

    def report(self, steps: Sequence[int]) -> dict[str, object]:
        """Return the judgements as JSON, given the steps after which each was made."""
        best, means = self.best, [self.mean(i) for i in range(len(self.judgements))]
        before, after = self.means(0), self.means(best)
        return {
            "steps": steps[-1],
            "best_step": steps[best],
            "first_kl": means[0],
            "best_kl": means[best],
            "judgements": [list(pair) for pair in zip(steps, means, strict=True)],
            "refused": self.refused(),
            "texts": {
                text: {"rows": len(rows), "first_kl": before[text], "best_kl": after[text]}
                for text, rows in self.texts.items()
            },
        }

    def outcome(self, summary: str) -> str:
        """Return in words, after a summary, what became of each text, and what was not taken."""
        note, refused = f"{summary} ({self.in_words(self.best)})", self.refused()
        return f"{note}; {refused}" if refused else note

    def refused(self) -> str:
        """Return in words why a judgement of a lower score is not taken; empty: none is lower."""
        scores = [self._score(i) for i in range(len(self.judgements))]
        lowest = scores.index(min(scores))
        if lowest == self.best:
            return ""
        texts = " and ".join(self.worse(lowest))
        return f"not taken, because {texts} text got worse: {self.in_words(lowest)}"

    def _score(self, judgement: int) -> float:
        first, now = self.means(0), self.means(judgement)
        ratios = [now[text] / first[text] if first[text] else 1.0 for text in now]
        return float(np.mean(ratios))

    def _by_text(self, judgement: int) -> dict[str, np.ndarray]:
        sizes = [len(rows) for rows in self.texts.values()]
        parts = np.split(np.asarray(self.judgements[judgement]), np.cumsum(sizes)[:-1])
        return dict(zip(self.texts, parts, strict=True))


def from_flat(texts: Mapping[str, torch.Tensor], flat: Sequence[float]) -> Judges:
    """Return judges whose judgements are these numbers, one after the other."""
    count = sum(map(len, texts.values()))
    return Judges(texts, [list(flat[i : i + count]) for i in range(0, len(flat), count)])
