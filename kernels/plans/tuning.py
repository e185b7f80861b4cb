"""The fastest way to run products on a GPU: measured once, kept in a file.

Another division or kernel sums in another order and so changes last bits. A choice once made
therefore stays: within a process, and for everything that reads the file.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import TypeVar

from exl2flow.core.errors import StoreError, WriteFailed
from exl2flow.core.store.files import digest, digest_of, exclusive, read_json, write_json
from exl2flow.kernels.interface.packed import FusedLinear, PackedMatrix
from exl2flow.kernels.plans.product import LaunchPlan, plan_of

Parts = tuple[int, ...]  # one number per product of a launch of `product`
Choice = Parts | str  # or another way
T = TypeVar("T")

APART = "apart"  # each product of a chain is a launch
BATCHED = "batched"  # a launch of `batched`
HALVED = "halved"  # half of the rows at a time
DECODED = "decoded"  # matrices are decoded, cuBLAS multiplies
WAYS = (APART, BATCHED, HALVED, DECODED)
MOST_CANDIDATES = 6
STEPS = (1, -1, 2, 3)  # added to the default number of parts
ROUNDS = 5  # the median of which counts
LEAST_GAIN = 0.02  # share of the time; less may be noise
log = logging.getLogger(__name__)


def candidates(
    products: Sequence[FusedLinear], rows: int, limits: tuple[int, int]
) -> list[LaunchPlan]:
    """Return up to `MOST_CANDIDATES` plans, the default first; arguments are those of `plan_of`.

    The others divide one product into other parts. No plans if the default does not fit.
    """
    first = plan_of(products, rows, limits)
    if first is None:
        return []
    plans = {first.parts: first}
    for step, index in product(STEPS, range(len(products))):
        parts = list(first.parts)
        parts[index] += step
        if parts[index] < 1:
            continue
        plan = plan_of(products, rows, limits, parts)
        if plan is not None:
            plans.setdefault(plan.parts, plan)
        if len(plans) == MOST_CANDIDATES:
            break
    return list(plans.values())


def fastest(options: Sequence[T], time: Callable[[T], float]) -> T:
    """Return the fastest option: the first one unless another gains `LEAST_GAIN`.

    Options take turns; the first turn does not count.
    """
    turns = [[time(option) for option in options] for _ in range(1 + ROUNDS)]
    times = [median(of_option) for of_option in zip(*turns[1:], strict=True)]
    best = min(range(len(options)), key=times.__getitem__)
    return options[best if times[best] < (1 - LEAST_GAIN) * times[0] else 0]


def key_of(products: Sequence[FusedLinear], rows: int, *, gpu: str, kernel: object) -> str:
    """Return the key of a choice: launches with the same key share it.

    Args:
        products: of the launch.
        rows: of x.
        gpu: its name.
        kernel: what else decides its speed, as JSON: its source, limits of the device.
    """
    shapes = [
        {
            "matrices": [_shape(matrix) for matrix in one.matrices],
            "norm": one.norm is not None,
            "after": one.after is not None,
            "activation": one.activation,
            "adds": one.adds,
        }
        for one in products
    ]
    return f"{gpu}, {rows} rows, {digest_of([shapes, kernel, _planning()])}"


def _shape(matrix: PackedMatrix) -> object:
    kinds = groupby((group.bits, group.rows) for group in matrix.groups)
    groups = [[*kind, len(list(same))] for kind, same in kinds]
    return [*matrix.shape, len(matrix.words), matrix.has_zeros, matrix.bias is not None, groups]


@cache
def _planning() -> str:
    """Return a digest of the rules and constants of plans."""
    names = ("product.py", "shares.py", "batched.py")
    return "".join(digest(Path(__file__).with_name(name)) for name in names)


class Tuning:
    """Choices by key: each is made once per process, and kept in a file.

    Threads and processes may share a file. A file that cannot be read counts as empty; a choice
    that cannot be written is not kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()  # products of a chain are measured within its measurement
        self._chosen = dict[str, Choice | None]()

    def choice(self, key: str, count: int, measure: Callable[[], Choice | None]) -> Choice | None:
        """Return the way to run `count` products: that chosen before, or that measured now.

        None, if nothing can be measured, holds for this process and is not kept in the file.
        """
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = self._stored(key, count) or self._recorded(
                    key, count, measure()
                )
            return self._chosen[key]

    def _stored(self, key: str, count: int) -> Choice | None:
        choice = self._read().get(key)
        return choice if isinstance(choice, str) or len(choice or ()) == count else None

    def _recorded(self, key: str, count: int, choice: Choice | None) -> Choice | None:
        """Keep a choice, or return the one another process has made meanwhile."""
        if choice is None:
            return None
        try:
            with exclusive(self._path):
                choice = self._stored(key, count) or choice
                write_json(self._path, {**self._read(), key: choice})
        except WriteFailed as error:
            log.info("tuning=%s kept=no reason=%s", self._path, error)
        return choice

    def _read(self) -> dict[str, Choice]:
        try:
            table = read_json(self._path)
        except StoreError:
            return {}
        rows = table.items() if isinstance(table, dict) else ()
        return {key: _choice_of(value) for key, value in rows if _is_choice(value)}


def _is_choice(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(x, int) and x > 0 for x in value)
    return isinstance(value, str) and value in WAYS


def _choice_of(value: list[int] | str) -> Choice:
    return value if isinstance(value, str) else tuple(value)
