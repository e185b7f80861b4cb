"""What a step costs by the number of its draft tokens, and how many are worth proposing.

Seconds are those between the results of one step and of the next, so they hold all of it: drafting,
verification, sampling, and the host. Until a step of a kind was seen, it is taken to cost as much
more than its like as its rows suggest.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from statistics import median

from exl2flow.core.options.environment import is_tuning
from exl2flow.engine.drafts.acceptance_rate import DraftKind

DRAFTED_ROWS = 32  # most rows of a step with drafts: more cost more than they save
COUNTS = (1, 2, 4, 8, 16)  # tokens per slot of a recorded step; or one more than drafts
DOUBLED = 16  # rows that cost twice as much as none, of steps that were not measured yet
DRAFTED = 0.05  # of a step, that a model takes for a draft token before it was measured
LAST = 9  # steps of a kind that are remembered
ENOUGH = 3  # of them, before which a slow one does not count
PLAIN = 5  # steps without a draft that come first, to be compared with

Key = tuple[int, str, int]  # slots, kind of draft, draft tokens per slot


def step_tokens(drafted: int, most: int) -> int:
    """Return the tokens per slot of the step that verifies `drafted` tokens, `most` at most."""
    return min(1 + most, next(count for count in COUNTS if count > drafted))


class StepCosts:
    """Seconds of steps by slots, kind and number of draft tokens; medians of the last ones."""

    def __init__(self, most: int) -> None:
        """`most`: draft tokens per slot."""
        self._most = most
        self._seconds = defaultdict[Key, deque[float]](lambda: deque(maxlen=LAST))
        self._begun = defaultdict[int, int](int)
        self._tables = dict[tuple[int, str], tuple[float, ...]]()
        self._measures, self._noted = is_tuning(), 0

    def compares(self, slots: int) -> bool:
        """Return whether enough steps without a draft were seen, and count one if not."""
        self._begun[slots] += 1
        return not self._measures or self._begun[slots] > PLAIN

    def note(self, slots: int, kind: str, drafted: int, seconds: float) -> None:
        """Take the seconds of a step."""
        if not self._measures:
            return
        known = self._seconds[slots, kind if drafted else "", drafted]
        known.append(seconds)
        self._noted += 1
        if len(known) < LAST or self._noted % LAST == 0:
            self._tables.clear()

    def of(self, slots: int, kind: str) -> tuple[float, ...]:
        """Return the costs of steps with 0, 1, … draft tokens per slot, in any unit."""
        key = slots, kind
        if key not in self._tables:
            self._tables[key] = tuple(self._cost(slots, kind, n) for n in range(1 + self._most))
        return self._tables[key]

    def best(self, slots: int, kind: str, rate: float, most: int) -> int:
        """Return how many draft tokens bring the most tokens per second, of `most`."""
        costs = self.of(slots, kind)
        gains = [tokens / cost for tokens, cost in zip(expected(rate, most), costs, strict=False)]
        return gains.index(max(gains))

    def shared(self, slots: int, kind: str, texts: Sequence[tuple[float, int]]) -> int:
        """Return the draft tokens at which a step of several texts should end.

        texts: acceptance rate and draft tokens of each, also of those without any.
        """
        costs, choices = self.of(slots, kind), sorted({0, *(n for _, n in texts)})

        def gain(most: int) -> float:
            return sum(expected(rate, n)[min(n, most)] for rate, n in texts) / costs[most]

        return max(choices, key=gain)

    def _cost(self, slots: int, kind: str, drafted: int) -> float:
        own = kind if drafted else ""
        known = self._seconds.get((slots, own, drafted), ())
        if len(known) >= ENOUGH:
            return median(known)
        guess, like = self._guess(slots, own, drafted), self._nearest(slots, own, drafted)
        if like is not None:
            guess *= median(self._seconds[like]) / self._guess(*like)
        return min(guess, median(known)) if known else guess

    def _nearest(self, slots: int, kind: str, drafted: int) -> Key | None:
        known = [
            key for key, seen in self._seconds.items() if len(seen) >= ENOUGH and key[0] == slots
        ]
        far = self._most + 1
        return min(
            known, key=lambda one: abs(one[2] - drafted) + far * (one[1] != kind), default=None
        )

    def _guess(self, slots: int, kind: str, drafted: int) -> float:
        drafting = 0.0 if kind in ("", DraftKind.NGRAM) else DRAFTED * drafted
        return 1 + slots * step_tokens(drafted, self._most) / DOUBLED + drafting


@lru_cache(4096)
def expected(rate: float, most: int) -> tuple[float, ...]:
    """Return the tokens that a step yields on average with 0, 1, … `most` draft tokens.

    rate: probability that a draft token is accepted if those before it are.
    """
    return tuple(accumulate(rate**n for n in range(1 + most)))
