"""Acceptance rates of draft tokens by their kind."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

DECAY = 0.9  # of earlier counts, per step
PAUSES = 32, 512  # tokens after which a text that drafts nothing tries again, at first and at last


class DraftKind(StrEnum):
    """What proposed draft tokens."""

    MODEL = "model"
    MTP = "mtp"
    NGRAM = "ngram"


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance rate of a text's draft tokens, which decays with every step.

    drafted, accepted: tokens so far.
    """

    drafted: int = 0
    accepted: int = 0
    _accepted: float = 4.0  # of the last ones
    _verified: float = 5.0
    _pause: int = PAUSES[0]
    _again: int = 0  # length of the text from which on it tries again

    @property
    def rate(self) -> float:
        """The probability that a draft token is accepted if those before it are, in hundredths."""
        return round(self._accepted / self._verified, 2)

    def most(self, length: int, best: Callable[[float], int]) -> int:
        """Return how many tokens to draft for a text: the best number, or 1 as a try.

        length: tokens of the text; best: number that is worth it, by acceptance rate.
        """
        if (found := best(self.rate)) or length < self._again:
            return found
        self._accepted, self._verified = 0.5, 1.0  # what was seen so long ago counts no more
        return max(1, best(self.rate))

    def note(self, length: int, drafted: int, accepted: int) -> None:
        """Update the acceptance rate; draft tokens after the first mismatch are not evidence.

        length: tokens of the text before.
        """
        self.drafted += drafted
        self.accepted += accepted
        self._accepted = DECAY * self._accepted + accepted
        self._verified = DECAY * self._verified + min(drafted, accepted + 1)
        self._pause = PAUSES[0] if accepted else min(2 * self._pause, PAUSES[1])
        self._again = length + self._pause


@dataclass(slots=True)
class Acceptance:
    """Acceptance rates of a text by the kind of draft."""

    rates: defaultdict[DraftKind, AcceptanceRate] = field(
        default_factory=lambda: defaultdict(AcceptanceRate)
    )

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """DraftKind → draft tokens, and accepted ones."""
        return {
            kind: (rate.drafted, rate.accepted) for kind, rate in self.rates.items() if rate.drafted
        }
