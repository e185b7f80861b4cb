"""95 % confidence intervals of scores, from the sums of their rows.

Rows are resampled with replacement, because the positions of one row depend on each other. Two
models scored on the same rows are compared pairwise: each resample takes the same rows of both.
Resampling is seeded, so equal rows give equal intervals. Percentiles are expanded, because those of
a plain bootstrap are too narrow for few rows.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exl2flow.core.reports import Interval, Intervals, RowSums

LEAST_ROWS = 8  # fewer rows say too little about the rows that were not drawn
CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 0
BATCH_ENTRIES = 1 << 20  # of resampled sums held at a time

Sums = NDArray[np.float64]  # (..., rows)


def intervals(rows: RowSums, other: RowSums | None = None) -> Intervals | None:
    """Return the intervals of a model's figures; with `other`, of the differences from its figures.

    Args:
        rows: the model's sums.
        other: sums of another model on the same rows.

    Returns:
        None for fewer than `LEAST_ROWS` rows.
    """
    if len(rows.tokens) < LEAST_ROWS:
        return None
    return Intervals(
        perplexity=_interval(_perplexity, "losses", rows, other),
        kl_divergence=_interval(_mean, "divergences", rows, other),
        top1_agreement=_interval(_mean, "agreements", rows, other),
    )


def _mean(sums: Sums, tokens: Sums) -> Any:
    return sums.sum(axis=-1) / tokens.sum(axis=-1)


def _perplexity(sums: Sums, tokens: Sums) -> Any:
    return np.exp(_mean(sums, tokens))


def _level(rows: int) -> float:
    """Return the confidence level at which percentiles of a bootstrap cover `CONFIDENCE`.

    Resamples of n rows spread less than new texts would, by sqrt((n - 1) / n), and their
    percentiles are those of a normal distribution where Student's t applies. So each tail of
    alpha / 2 shrinks to Phi(-sqrt(n / (n - 1)) · t), with t the quantile 1 - alpha / 2 of n - 1
    degrees of freedom: the expanded percentile interval of Hesterberg, "What Teachers Should Know
    About the Bootstrap", The American Statistician 69 (2015), 371-386.
    """
    from scipy.stats import norm, t

    quantile = t.ppf(0.5 + CONFIDENCE / 2, rows - 1)
    return float(1 - 2 * norm.cdf(-math.sqrt(rows / (rows - 1)) * quantile))


def _interval(
    figure: Callable[[Sums, Sums], Any], name: str, rows: RowSums, other: RowSums | None
) -> Interval | None:
    """Return the interval of a figure, or of a difference; None if it is not finite."""
    from scipy.stats import bootstrap  # whose import takes a second

    sums = [getattr(known, name) for known in (rows, other) if known is not None]
    if None in sums:
        return None
    columns = [np.asarray(values, dtype=np.float64) for values in (rows.tokens, *sums)]
    with np.errstate(over="ignore"):
        alone = [figure(values[:, None], columns[0][:, None]) for values in columns[1:]]
    if not np.isfinite(alone).all():  # of a row alone, which a resample may consist of
        return None

    def statistic(tokens: Sums, *sums: Sums, axis: int) -> Any:
        first, *rest = (figure(values, tokens) for values in sums)
        return first - rest[0] if rest else first

    result = bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        axis=-1,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH_ENTRIES // len(rows.tokens)),
        confidence_level=_level(len(rows.tokens)),
        method="percentile",  # also defined where all rows agree
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return float(result.low), float(result.high)
