"""The calibration rows that a model writes itself: how many, how long, how much memory."""

from dataclasses import dataclass
from math import prod

from exl2flow.core.options.config import CalibrationOptions
from exl2flow.model.config.spec import ModelSpec, expected_tensors

ROWS_AT_ONCE = 32
CACHE_BYTES = 2 * 2**30  # limit for keys and values of the rows written at once, as fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """`rows` rows of `tokens` tokens, `at_once` in a batch, in texts of at most `span` tokens.

    elements: numbers in memory, i.e. all weights and the batch's keys and values.
    """

    rows: int
    tokens: int
    span: int
    at_once: int
    elements: int

    @classmethod
    def of(cls, spec: ModelSpec, calibration: CalibrationOptions) -> "Composition":
        """Plan enough rows for both measuring and quantizing, which share them."""
        sizes = (
            (calibration.special_rows(calibration.rows), calibration.row_tokens),
            (calibration.special_rows(calibration.measure_rows), calibration.measure_row_tokens),
        )
        rows, tokens = max(count for count, _ in sizes), max(length for _, length in sizes)
        span = min(tokens, spec.max_positions)
        row = 2 * sum(attention.kv_width for attention in spec.attending) * span
        at_once = max(1, min(rows, ROWS_AT_ONCE, CACHE_BYTES // (4 * row)))
        weights = sum(map(prod, expected_tensors(spec).values()))
        return cls(
            rows=rows, tokens=tokens, span=span, at_once=at_once, elements=weights + at_once * row
        )
