"""The rows of each step of a training."""

from collections.abc import Sequence

import numpy as np


class RowOrder:
    """The rows of each step: all rows in turn, in a new order each round, pieces in even shares.

    They depend only on the pieces, the seed and the number of the step.
    """

    def __init__(self, pieces: Sequence[range], together: int, *, seed: int) -> None:
        """Take the pieces of all rows, and the number of rows in each step: all at most."""
        halves = [*pieces[::2], *pieces[1::2]]  # neighbours are often of one rank
        shares = [
            ((place + 0.5) / len(piece), number, place)
            for number, piece in enumerate(halves)
            for place in range(len(piece))
        ]
        self.turns = [(halves[number], place) for _, number, place in sorted(shares)]
        self.together, self.seed = min(together, len(self.turns)), seed

    def __call__(self, step: int) -> list[int]:
        """Return the numbers of a step's rows."""
        places = range(step * self.together, (step + 1) * self.together)
        return [self._row(place) for place in places]

    def _row(self, place: int) -> int:
        lap, turn = divmod(place, len(self.turns))
        piece, index = self.turns[turn]
        order = np.random.default_rng((self.seed, lap)).permutation(len(piece))
        return piece[int(order[index])]
