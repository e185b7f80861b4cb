"""Bit allocation for very many slots: the Lagrangian bound, and a choice close to it.

A price per bit makes slots independent, and the least sums of cost + price * bits bound the
optimum from below. At the best price one slot alone is undecided, so the more slots, the closer a
choice gets: exchanges of single options, and of pairs, spend what is left of the budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PRICES = 100  # of a bit that are tried: halving an interval
NEGLIGIBLE = 1e-7  # gap, as a share of the cost, below which nothing more is exchanged
EXCHANGES = 100  # at most
TOLERANCE = 1e-9  # for rounding in sums of costs

Numbers = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """choice: option index per slot, int64 (slots,), within the budget; bound: of the optimum.

    fronts: by slot, the options that may be in an optimum, by rising bits.
    """

    choice: np.ndarray
    bound: float
    fronts: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fronts:
    """Options that no other one equals or beats, by rising bits; each (slots, options).

    bits: int64; cost: fp64, infinite where a slot has fewer options; index: of the option.
    """

    bits: np.ndarray
    cost: np.ndarray
    index: np.ndarray

    def at(self, picked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return bits and cost of an option of each slot."""
        slots = np.arange(len(picked))
        return self.bits[slots, picked], self.cost[slots, picked]


def relaxed(bits: Sequence[Sequence[int]], cost: Numbers, budget: int) -> Relaxed:
    """Choose one option per slot within the budget, close to the least cost.

    Args:
        bits: exact bits of each option of each slot.
        cost: cost of the same options; any finite numbers.
        budget: total bits permitted, at least those of the smallest options.
    """
    fronts = _fronts(bits, cost)
    price, low, picked = _priced(fronts, budget)
    picked = _toward(fronts, picked, low, budget)
    priced = fronts.cost + price * fronts.bits
    least = priced.min(axis=1)
    bound = math.fsum(least) - price * budget
    slots, excess = np.arange(len(picked)), priced - least[:, None]
    picked = _exchanged(fronts, picked, excess, budget, bound)
    # with an option whose excess is larger than the gap, the others cost more than this choice
    slack = budget - fronts.bits[slots, picked].sum()
    gap = excess[slots, picked].sum() + price * slack
    most = gap * (1 + TOLERANCE) + TOLERANCE * np.abs(priced[slots, picked]).max()
    return Relaxed(
        choice=fronts.index[slots, picked],
        bound=bound,
        fronts=[row[kept].tolist() for row, kept in zip(fronts.index, excess <= most, strict=True)],
    )


def _table(rows: Numbers, dtype: type, rest: float) -> np.ndarray:
    """Return rows of unequal lengths as a table, filled up with `rest`."""
    lengths = np.array([len(row) for row in rows])
    table = np.full((len(rows), lengths.max()), rest, dtype)
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        table[same, :length] = np.array([rows[i] for i in same.tolist()], dtype)
    return table


def _fronts(bits: Sequence[Sequence[int]], cost: Numbers) -> _Fronts:
    """Sort options by bits and drop each that another one equals or beats in bits and cost."""
    b, c = _table(bits, np.int64, 0), _table(cost, np.float64, np.inf)
    b[np.isinf(c)] = np.iinfo(np.int64).max
    order = np.lexsort((c, b), axis=-1)  # stable: the first of equals wins
    b, c = np.take_along_axis(b, order, axis=1), np.take_along_axis(c, order, axis=1)
    before = np.minimum.accumulate(c, axis=1)[:, :-1]
    keep = np.concatenate([np.ones((len(c), 1), bool), c[:, 1:] < before], axis=1)
    row, column = np.nonzero(keep)
    place = (np.cumsum(keep, axis=1) - 1)[row, column]
    shape = (len(c), int(place.max()) + 1)
    fronts = _Fronts(
        bits=np.repeat(b[:, :1], shape[1], axis=1),
        cost=np.full(shape, np.inf),
        index=np.zeros(shape, np.int64),
    )
    for kept, values in ((fronts.bits, b), (fronts.cost, c), (fronts.index, order)):
        kept[row, place] = values[row, column]
    return fronts


def _priced(fronts: _Fronts, budget: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the price at which the budget is met, and the choices just below and above it.

    The latter is within the budget; the former, where prices differ, is above it and costs less.
    """
    b, c = fronts.bits, fronts.cost
    slots, size = np.arange(len(b)), b.astype(np.float64)
    room = np.empty_like(c)

    def picked(price: float) -> np.ndarray:
        np.multiply(size, price, out=room)
        np.add(room, c, out=room)
        best: np.ndarray = room.argmin(axis=1)
        return best

    above = np.zeros(len(b), np.int64)  # the smallest options, which fit
    low, high = 0.0, float(np.ptp(c[np.isfinite(c)])) + 1e-300  # a bit is worth less
    below = picked(low)
    if b[slots, below].sum() <= budget:
        return low, below, below
    for _ in range(PRICES):
        price = (low + high) / 2
        choice = picked(price)
        if b[slots, choice].sum() <= budget:
            high, above = price, choice
        else:
            low, below = price, choice
    return high, below, above


def _toward(fronts: _Fronts, picked: np.ndarray, other: np.ndarray, budget: int) -> np.ndarray:
    """Take over slots of a better choice while they fit; what saves most per bit comes first."""
    (b, c), (other_b, other_c) = fronts.at(picked), fronts.at(other)
    more, gain = other_b - b, c - other_c
    slots = np.flatnonzero((more > 0) & (gain > 0))
    slots = slots[np.argsort(-gain[slots] / more[slots], kind="stable")]
    fits = np.cumsum(more[slots]) <= budget - b.sum()
    picked = picked.copy()
    picked[slots[fits]] = other[slots[fits]]
    return picked


def _exchanged(
    fronts: _Fronts, picked: np.ndarray, excess: np.ndarray, budget: int, bound: float
) -> np.ndarray:
    """Exchange the options of one slot or of two as long as that lowers the cost.

    Args:
        fronts: the options.
        picked: one per slot, int64 (slots,), within the budget.
        excess: cost + price * bits above the slot's least, fp64 (slots, options).
        budget: total bits permitted.
        bound: lower bound of the total cost.
    """
    picked = picked.copy()
    b, c = fronts.at(picked)
    gap = c.sum() - bound
    # an option with a larger excess than the gap cannot be part of what closes it
    slot, option = np.nonzero(excess <= gap)
    excess = excess[slot, option]
    for _ in range(EXCHANGES):
        if gap <= NEGLIGIBLE * abs(c.sum()):
            break
        more = fronts.bits[slot, option] - b[slot]
        gain = c[slot] - fronts.cost[slot, option]
        best = _best_pair(slot, more, gain, int(budget - b.sum()))
        if c[slot[best]].sum() <= fronts.cost[slot[best], option[best]].sum():
            break
        picked[slot[best]] = option[best]
        b, c = fronts.at(picked)
        gap = c.sum() - bound
        near = excess <= gap
        slot, option, excess = slot[near], option[near], excess[near]
    return picked


def _best_pair(slot: np.ndarray, more: np.ndarray, gain: np.ndarray, left: int) -> np.ndarray:
    """Return the exchange, or the two of different slots, that gain most within `left` bits.

    Args:
        slot: of each exchange, int64 (n,).
        more: bits that it takes, int64 (n,).
        gain: cost that it saves, fp64 (n,).
        left: bits that may be taken, from 0 on.

    Returns:
        places in these arrays, int64 (0 to 2,).
    """
    slot, more, gain = np.append(slot, -1), np.append(more, 0), np.append(gain, 0.0)  # no exchange
    order = np.argsort(more, kind="stable")
    sorted_gain = gain[order]
    most = np.maximum.accumulate(sorted_gain)
    is_new = np.append(True, sorted_gain[1:] > most[:-1])
    at = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    last = np.searchsorted(more[order], left - more, side="right") - 1
    other = order[at[last]]
    total = np.where((last >= 0) & (slot[other] != slot), gain + gain[other], -np.inf)
    first = int(total.argmax())
    pair = np.array([first, other[first]]) if total[first] > 0 else np.array([], np.int64)
    return pair[slot[pair] >= 0]
