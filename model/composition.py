"""Sizes of the calibration rows that a model writes itself, for pre-flight and for the stage."""

from dataclasses import dataclass
from math import prod

from exl2flow.core.config import CalibrationOptions
from exl2flow.model.spec import ModelSpec, expected_tensors

ROWS_AT_ONCE = 32
CACHE_BYTES = 2 * 2**30  # keys and values of the rows written at once, counted as fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """`rows` rows of `tokens` tokens, `at_once` in a batch, in texts of at most `span` tokens.

    `elements` counts the numbers in memory: all weights, and the keys and values of a batch.
    """

    rows: int
    tokens: int
    span: int
    at_once: int
    elements: int

    @classmethod
    def of(cls, spec: ModelSpec, calibration: CalibrationOptions) -> "Composition":
        """Plan enough rows for measuring and for quantizing, which share them."""
        sizes = (
            (calibration.special_rows(calibration.rows), calibration.row_tokens),
            (calibration.special_rows(calibration.measure_rows), calibration.measure_row_tokens),
        )
        rows, tokens = max(count for count, _ in sizes), max(length for _, length in sizes)
        span = min(tokens, spec.max_positions)
        row = 2 * spec.num_layers * spec.attention.num_kv_heads * spec.attention.head_dim * span
        at_once = max(1, min(rows, ROWS_AT_ONCE, CACHE_BYTES // (4 * row)))
        weights = sum(map(prod, expected_tensors(spec).values()))
        return cls(
            rows=rows, tokens=tokens, span=span, at_once=at_once, elements=weights + at_once * row
        )
