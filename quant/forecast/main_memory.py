"""What each stage takes in memory and on disk, forecast from shapes and options alone.

A forecast is to be above what a run takes. Constants count what exists at the worst moment of the
code they speak of; the sums were compared with the peaks of models that are mostly states, mostly
wide matrices and mostly head.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exl2flow.core.config import ConversionConfig
from exl2flow.core.refine import RefinementConfig
from exl2flow.model import ModelSpec
from exl2flow.model.exl2 import padded_columns
from exl2flow.quant.allocate.layout import plain_tensors
from exl2flow.quant.allocate.stage import HELD_OUT_ROWS, HESSIAN_ROWS
from exl2flow.quant.forecast.calibration import composing_bytes
from exl2flow.quant.measure.candidates import PROJECTION_OPTIONS, single_widths
from exl2flow.quant.quantize.correction import paired_rows
from exl2flow.quant.rounding.error_feedback import BATCH_ELEMENTS
from exl2flow.quant.sensitivity import stage as sensitivity
from exl2flow.quant.sensitivity.fisher import factor_bytes
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.walk.divergence import LOGIT_POSITIONS

FLOAT = 4  # bytes of states and working weights, fp32
SUBLAYER = 34  # per weight of a sublayer: read, padded, rounded, refined, decoded, packed
CORRECTED = 8  # in addition: targets, and one that is being made
VARIANTS = 14  # distinct candidates of a projection where sublayers are measured
BATCHED = 13  # per weight rounded side by side: joined, ordered, codes, the search for scales
OWN = 28  # per weight of a projection that is measured: read, padded, errors and products of them
ENTRY = 1100  # of a measured candidate, in both files that hold it
IDS = 8  # of a token's id
HEAD = 32  # per weight of the head: like a sublayer's, one candidate at a time
HESSIANS = 10  # matrices (k, k) from a Hessian to its factor
LOGITS = 6  # copies of logits: of both models, their logarithms, differences
STATE_FILES = 3  # saved states: two in turn, and the one that takes a place
DISTILLED = 4  # numbers per trained one in a saved state: value, two moments, best value


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of a stage at most; memory: beside the process; kept, passing: on disk."""

    memory: int
    kept: int = 0
    passing: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the need as JSON."""
        return {
            "memory_bytes": self.memory,
            "kept_bytes": self.kept,
            "passing_bytes": self.passing,
        }


def work_bytes(needs: Mapping[str, Need]) -> int:
    """Return what lies in the work directory at most: all that stays, and one stage's passing."""
    return sum(need.kept for need in needs.values()) + max(n.passing for n in needs.values())


def memory_bytes(needs: Mapping[str, Need]) -> int:
    """Return the memory of the stage that takes most of it."""
    return max(need.memory for need in needs.values())


def stage_needs(
    config: ConversionConfig, spec: ModelSpec, device: torch.device | None, *, packed: int
) -> dict[str, Need]:
    """Return what the stages that take much need, by name, in order.

    Args:
        config: the conversion.
        spec: its source.
        device: where tensors are computed; main memory is forecast as if it were the CPU's, but
            for stages that hold the whole model there.
        packed: bytes of all quantized matrices.
    """
    rows = config.calibration
    needs: dict[str, Need] = {}
    if rows.text == "self":
        needs["compose"] = Need(memory=composing_bytes(config, spec, device))
    positions = rows.rows * rows.row_tokens + rows.measure_rows * rows.measure_row_tokens
    needs["tokenize"] = Need(memory=2 * IDS * positions, kept=IDS * positions)
    if config.sensitivity.kind == "fisher":
        needs["sensitivity"] = _sensitivity(config, spec)
    if config.measurement is None:
        needs["measure"] = _measure(config, spec)
    if config.allocate.rounds:
        needs["allocate"] = Need(memory=_trials(config, spec))
    needs["quantize"] = _quantize(config, spec, packed)
    if config.tune.steps:
        needs["tune"] = _tune(config, spec, device, packed)
    if isinstance(config, RefinementConfig):  # it neither measures nor allots
        needs = {name: need for name, need in needs.items() if name not in _ALLOTTING}
    return needs


_ALLOTTING = ("measure", "allocate", "tune")


def _sensitivity(config: ConversionConfig, spec: ModelSpec) -> Need:
    options, row_tokens = config.sensitivity, config.calibration.row_tokens
    kept = sensitivity.disk_bytes(spec, options.model_copy(update={"rows": 0}), row_tokens)
    return Need(
        memory=sensitivity.memory_bytes(spec, options, row_tokens),
        kept=kept,
        passing=sensitivity.disk_bytes(spec, options, row_tokens) - kept,
    )


def _measure(config: ConversionConfig, spec: ModelSpec) -> Need:
    """Every row's output is kept beside its input; many candidates are rounded at once."""
    rows = config.calibration
    row_tokens = rows.measure_row_tokens
    states = _states(spec, rows.measure_rows * row_tokens)
    largest = _largest(spec)
    if config.sensitivity.kind == "fisher":
        widest = _largest_projection(spec)
        batch = min(max(widest, BATCH_ELEMENTS), len(single_widths(PROJECTION_OPTIONS)) * widest)
        working = FLOAT * largest + OWN * widest + (BATCHED + FLOAT) * batch  # errors are kept
    else:
        working = SUBLAYER * largest + BATCHED * min(BATCH_ELEMENTS, VARIANTS * largest)
    working = max(working, _head(spec, row_tokens)) + _shared(config, spec, row_tokens)
    projections = sum(len(s.projections) for s in spec.sublayers) + 1
    return Need(
        memory=max(_begun(spec, states), 2 * states + working),
        kept=ENTRY * projections * len(PROJECTION_OPTIONS),
        passing=STATE_FILES * states,
    )


def _trials(config: ConversionConfig, spec: ModelSpec) -> int:
    """The allocation, a uniform one, the source, and one of every sublayer left as it was."""
    rows = config.calibration
    judging = min(HELD_OUT_ROWS, rows.rows // 2)
    training = rows.rows - judging
    seen = len(range(0, training, max(1, training // HESSIAN_ROWS)))
    copies = 3 + len(spec.sublayers)
    states = _states(spec, (2 * seen + copies * judging) * rows.row_tokens)
    working = max(SUBLAYER * _largest(spec), _head(spec, rows.row_tokens))
    return states + working + _shared(config, spec, rows.row_tokens)


def _quantize(config: ConversionConfig, spec: ModelSpec, packed: int) -> Need:
    """Corrected targets need some of the source's states beside the quantized model's."""
    rows = config.calibration
    corrected = bool(config.rounding.correction) and not isinstance(config, RefinementConfig)
    states = _states(spec, rows.rows * rows.row_tokens)
    paired = _states(spec, len(paired_rows(rows.rows)) * rows.row_tokens) if corrected else 0
    working = max(
        (SUBLAYER + CORRECTED * corrected) * _largest(spec), _head(spec, rows.row_tokens)
    ) + _shared(config, spec, rows.row_tokens)
    begun = _begun(spec, states) + 2 * paired
    return Need(
        memory=max(begun, states + paired + working),
        kept=packed,
        passing=STATE_FILES * (states + paired),
    )


def _tune(
    config: ConversionConfig, spec: ModelSpec, device: torch.device | None, packed: int
) -> Need:
    """What is trained is the plain tensors, and the codes if they move; groups are few."""
    options = config.tune
    plain = sum(torch.Size(shape).numel() for shape in plain_tensors(spec).values())
    codes = sum(p.in_features * p.out_features for s in spec.sublayers for p in s.projections)
    trained = plain if options.embedding_rate else plain - spec.vocab_size * spec.hidden_size
    if options.code_rate:
        trained += codes + spec.head.in_features * spec.head.out_features
    state = DISTILLED * FLOAT * trained
    in_main = device is None or device.type == "cpu"
    return Need(
        memory=state + (tune_memory(spec, options) if in_main else 0),
        kept=packed + 2 * plain,
        passing=STATE_FILES * state,
    )


def _states(spec: ModelSpec, positions: int) -> int:
    return positions * spec.hidden_size * FLOAT


def _begun(spec: ModelSpec, states: int) -> int:
    """Embedding, head, and the states both as rows and as a whole."""
    return 2 * states + 2 * spec.vocab_size * spec.hidden_size * FLOAT


def _shared(config: ConversionConfig, spec: ModelSpec, row_tokens: int) -> int:
    """What every walk needs beside states and weights: a row, Hessians, Fisher factors."""
    widest = max(p.in_features for s in spec.sublayers for p in s.projections)
    size = 8 * row_tokens * max(widest, spec.hidden_size) * FLOAT
    size += HESSIANS * widest * widest * FLOAT
    if config.sensitivity.kind == "fisher":
        block = config.sensitivity.block
        factors = [factor_bytes(s.projections, block=block) for s in spec.sublayers]
        head = factor_bytes((spec.head,), block=sensitivity.head_block(block))
        size += 2 * max(*factors, head)  # one half of each is on disk
    return size


def _largest(spec: ModelSpec) -> int:
    return max(sum(p.in_features * p.out_features for p in s.projections) for s in spec.sublayers)


def _largest_projection(spec: ModelSpec) -> int:
    projections = [*(p for s in spec.sublayers for p in s.projections), spec.head]
    return max(p.in_features * padded_columns(p.out_features) for p in projections)


def _head(spec: ModelSpec, row_tokens: int) -> int:
    logits = min(row_tokens, LOGIT_POSITIONS) * spec.vocab_size
    return HEAD * spec.head.in_features * spec.head.out_features + LOGITS * logits * FLOAT
