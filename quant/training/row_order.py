"""The rows of each step of a training."""

import numpy as np


class RowOrder:
    """The rows of each step: all rows in turn, in a new order each round.

    They depend only on the seed and the number of the step.
    """

    def __init__(self, rows: int, together: int, *, seed: int) -> None:
        """Take the number of rows, and of those in each step: all at most."""
        self.rows, self.together, self.seed = rows, min(together, rows), seed

    def __call__(self, step: int) -> list[int]:
        """Return the indices of a step's rows."""
        places = range(step * self.together, (step + 1) * self.together)
        return [self._row(place) for place in places]

    def _row(self, place: int) -> int:
        lap, index = divmod(place, self.rows)
        return int(np.random.default_rng((self.seed, lap)).permutation(self.rows)[index])
