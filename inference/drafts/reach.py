"""How many tokens are worth guessing."""

import math
from dataclasses import dataclass

from exl2flow.inference.drafts.guesses import MOST_DRAFTED

WORTH = 0.25
MEMORY = 0.9  # of what was seen, per pass


@dataclass(slots=True)
class Reach:
    """Follows how many guesses for a text are right, and counts them.

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
        """Count the guesses of a pass; those behind a wrong one say nothing."""
        self.drafted += drafted
        self.accepted += accepted
        self._right = MEMORY * self._right + accepted
        self._tried = MEMORY * self._tried + min(drafted, accepted + 1)
