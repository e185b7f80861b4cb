"""The acceptance rate of draft tokens, and how many are worth proposing."""

import math
from dataclasses import dataclass

from exl2flow.inference.drafts.proposer import MOST_DRAFTED

WORTH = 0.25
MEMORY = 0.9  # of what was seen, per pass


@dataclass(slots=True)
class AcceptanceRate:
    """Follows how many draft tokens of a text are accepted, and counts them.

    drafted, accepted: tokens so far.
    """

    drafted: int = 0
    accepted: int = 0
    _right: float = 4.0  # of the last ones
    _tried: float = 5.0

    @property
    def tokens(self) -> int:
        """How many to guess next, at least one: with a rate of p, as long as p^n is `WORTH` it."""
        rate = min(self._right / self._tried, 0.99)
        return max(1, min(MOST_DRAFTED, int(math.log(WORTH) / math.log(max(rate, 0.01)))))

    def note(self, drafted: int, accepted: int) -> None:
        """Update the acceptance rate; draft tokens after the first mismatch are not evidence."""
        self.drafted += drafted
        self.accepted += accepted
        self._right = MEMORY * self._right + accepted
        self._tried = MEMORY * self._tried + min(drafted, accepted + 1)
