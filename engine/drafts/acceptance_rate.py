"""Acceptance rates of draft tokens by their kind, and how many are worth proposing."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

WORTH = 0.25
DECAY = 0.9  # of earlier counts, per step


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance rate of a text's draft tokens, which decays with every step.

    drafted, accepted: tokens so far.
    """

    drafted: int = 0
    accepted: int = 0
    _accepted: float = 4.0  # of the last ones
    _verified: float = 5.0

    @property
    def tokens(self) -> int:
        """The number n of tokens to draft: at rate p, the largest with p^n ≥ `WORTH`, or 1."""
        rate = min(self._accepted / self._verified, 0.99)
        return max(1, int(math.log(WORTH) / math.log(max(rate, 0.01))))

    def note(self, drafted: int, accepted: int) -> None:
        """Update the acceptance rate; draft tokens after the first mismatch are not evidence."""
        self.drafted += drafted
        self.accepted += accepted
        self._accepted = DECAY * self._accepted + accepted
        self._verified = DECAY * self._verified + min(drafted, accepted + 1)


@dataclass(slots=True)
class Acceptance:
    """Acceptance rates of a text by the kind of draft."""

    rates: defaultdict[str, AcceptanceRate] = field(
        default_factory=lambda: defaultdict(AcceptanceRate)
    )

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """DraftKind → draft tokens, and accepted ones."""
        return {
            kind: (rate.drafted, rate.accepted) for kind, rate in self.rates.items() if rate.drafted
        }
