"""The calibration rows that a model writes itself: how many, how long, how much memory."""

from dataclasses import dataclass
from math import prod

from exl2flow.core.options.config import CalibrationOptions, RunOptions
from exl2flow.model.config.spec import ModelSpec, expected_tensors
from exl2flow.model.memory.footprint import HALF

TEXT_TOKENS = 2048  # of a text at most; a longer row is several of them
TEXTS_AT_ONCE = 256
CACHE_ELEMENTS = 2**29  # for the keys and values of texts that are written at once, at least
ROOM = 0.8  # of a GPU's free memory, for weights and these


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """`rows` rows of `tokens` tokens, each `in_row` texts of `span` tokens, `at_once` in a batch.

    weights: of the whole model; elements: numbers in memory: weights, the batch's keys and values.
    """

    rows: int
    tokens: int
    span: int
    in_row: int
    at_once: int
    weights: int
    elements: int

    @classmethod
    def of(
        cls, spec: ModelSpec, calibration: CalibrationOptions, *, memory: int = 0, training: int = 0
    ) -> "Composition":
        """Plan enough rows for both measuring and quantizing, which share them, and more to train.

        Args:
            spec: the model.
            calibration: which rows.
            memory: free bytes of the GPU that holds all of the model; 0: another device. The more,
                the more texts are written at once.
            training: rows that are only trained on.
        """
        rows = calibration.written_rows + training
        tokens = max(calibration.row_tokens, calibration.measure_row_tokens)
        span = min(tokens, spec.max_positions, TEXT_TOKENS)
        in_row = -(-tokens // span)
        text = 2 * sum(attention.kv_width for attention in spec.attending) * span
        weights = sum(map(prod, expected_tensors(spec).values()))
        room = max(CACHE_ELEMENTS, int(ROOM * memory) // HALF - weights)
        at_once = max(1, min(rows * in_row, TEXTS_AT_ONCE, room // max(1, text)))
        return cls(
            rows=rows,
            tokens=tokens,
            span=span,
            in_row=in_row,
            at_once=at_once,
            weights=weights,
            elements=weights + at_once * text,
        )

    @classmethod
    def of_run(cls, spec: ModelSpec, config: RunOptions, free: int | None) -> "Composition":
        """Plan the rows of a run; `free` bytes of the GPU, None on a CPU."""
        memory = 0 if config.is_split or free is None else free
        return cls.of(spec, config.calibration, memory=memory, training=config.training_rows)

    @property
    def texts(self) -> int:
        """The texts of all rows."""
        return self.rows * self.in_row
