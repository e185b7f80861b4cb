"""Intervals over rows: what they contain, what narrows them, and when there are none."""

import math
from dataclasses import replace

import numpy as np
import pytest

from exl2flow.core.reports import Intervals, RowSums
from exl2flow.inference.scoring.intervals import LEAST_ROWS, intervals

ROWS, TOKENS = 16, 100
TRIALS = 400


def sums(rows: int = ROWS, *, seed: int = 0, scale: float = 1.0, shift: float = 0.0) -> RowSums:
    """Return rows of very different difficulty, whose divergences are scaled and shifted."""
    rng = np.random.default_rng(seed)
    kl = rng.lognormal(-3, 0.5, rows)
    return RowSums(
        tokens=(TOKENS,) * rows,
        losses=tuple(TOKENS * rng.normal(2, 0.2, rows)),
        divergences=tuple(TOKENS * (scale * kl + shift)),
        agreements=tuple(int(n) for n in rng.integers(80, 100, rows)),
    )


def known(found: Intervals | None) -> Intervals:
    assert found is not None
    return found


def test_intervals_surround_the_figures_they_belong_to() -> None:
    rows = sums()

    found = known(intervals(rows))

    total = sum(rows.tokens)
    figures = (
        (math.exp(sum(rows.losses) / total), found.perplexity),
        (sum(rows.divergences or ()) / total, found.kl_divergence),
        (sum(rows.agreements or ()) / total, found.top1_agreement),
    )
    for value, interval in figures:
        assert interval is not None
        assert interval[0] < value < interval[1]


def test_a_row_counts_by_its_tokens() -> None:
    """A row of one token hardly moves the interval, whatever it holds."""
    plain = sums()
    short = replace(
        plain, tokens=(*plain.tokens[:-1], 1), divergences=(*(plain.divergences or ())[:-1], 1.0)
    )

    low, high = known(intervals(short)).kl_divergence or (0, 0)

    assert (low, high) == pytest.approx(known(intervals(plain)).kl_divergence, rel=0.1)


def test_rows_that_agree_give_an_interval_without_width() -> None:
    rows = replace(sums(), divergences=(0.0,) * ROWS, agreements=(TOKENS,) * ROWS)

    found = known(intervals(rows))

    assert found.kl_divergence == (0.0, 0.0)
    assert found.top1_agreement == (1.0, 1.0)


def test_a_small_difference_on_the_same_rows_is_sure_although_the_intervals_overlap() -> None:
    smaller, larger = sums(scale=1.0), sums(scale=0.9)

    apart = [known(intervals(rows)).kl_divergence or (0, 0) for rows in (smaller, larger)]
    difference = known(intervals(larger, smaller)).kl_divergence or (0, 0)

    assert apart[1][1] > apart[0][0]
    assert difference[1] < 0


def test_models_that_are_equal_differ_by_nothing() -> None:
    found = known(intervals(sums(), sums()))

    assert found == Intervals(
        perplexity=(0.0, 0.0), kl_divergence=(0.0, 0.0), top1_agreement=(0.0, 0.0)
    )


def test_equal_rows_give_equal_intervals() -> None:
    assert intervals(sums()) == intervals(sums())


def test_fewer_than_eight_rows_have_no_intervals() -> None:
    assert LEAST_ROWS == 8
    assert intervals(sums(7)) is None
    assert intervals(sums(8)) is not None


@pytest.mark.parametrize("loss", [math.inf, math.nan, 1e6])
def test_a_perplexity_that_is_not_finite_has_no_interval(loss: float) -> None:
    rows = replace(sums(), losses=(loss,) * ROWS)

    found = known(intervals(rows))

    assert found.perplexity is None
    assert found.kl_divergence is not None


def test_without_a_reference_only_perplexity_has_an_interval() -> None:
    found = known(intervals(replace(sums(), divergences=None, agreements=None)))

    assert found.perplexity is not None
    assert (found.kl_divergence, found.top1_agreement) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 16])
def test_intervals_of_few_rows_contain_the_figures_of_all_texts_about_as_often_as_they_say(
    rows: int,
) -> None:
    """95 % is the aim; plain percentiles contain them in 86 to 91 of 100 cases."""
    expected = {"perplexity": math.exp(2), "kl_divergence": math.exp(-3 + 0.5**2 / 2)}
    found = [known(intervals(sums(rows, seed=seed))) for seed in range(TRIALS)]

    for name, value in expected.items():
        bounds = [getattr(sure, name) for sure in found]
        assert sum(low <= value <= high for low, high in bounds) >= 0.915 * TRIALS, name


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"tokens": [], "losses": []},
        {"tokens": [1, 2], "losses": [1.0]},
        {"tokens": [0], "losses": [1.0]},
        {"tokens": [1], "losses": ["1"]},
        {"tokens": [10**400], "losses": [1.0]},
    ],
)
def test_rows_of_a_file_that_make_no_sense_are_unknown(value: object) -> None:
    assert RowSums.of(value) is None


def test_intervals_of_a_file_that_make_no_sense_are_unknown() -> None:
    found = Intervals.of({"perplexity": [1.0], "kl_divergence": "x", "top1_agreement": [0.5, 1]})

    assert found == Intervals(perplexity=None, kl_divergence=None, top1_agreement=(0.5, 1))
    assert Intervals.of(7) is None
