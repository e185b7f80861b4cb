"""Upper bounds of the memory and disk that each stage needs, from shapes and options alone.

Constants count what exists at the worst moment of the code they describe. The sums were compared
with the peaks of models that are mostly hidden states, mostly wide matrices or mostly head.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from exl2flow.core.background import HELPERS
from exl2flow.core.config import ConversionConfig
from exl2flow.core.memory import free_memory, limit_memory
from exl2flow.core.refine import RefinementConfig
from exl2flow.model import Composition, ModelSpec, ProjectionSpec
from exl2flow.model.exl2 import padded_columns
from exl2flow.quant.allocate.layout import plain_tensors
from exl2flow.quant.allocate.stage import HELD_OUT_ROWS, HESSIAN_ROWS
from exl2flow.quant.measure.candidates import (
    HEAD_OPTIONS,
    PROJECTION_OPTIONS,
    candidates_for,
    single_widths,
)
from exl2flow.quant.quantize.correction import paired_rows
from exl2flow.quant.rounding.error_feedback import BATCH_ELEMENTS, gpu_batch_elements
from exl2flow.quant.sensitivity import stage as sensitivity
from exl2flow.quant.sensitivity.fisher import factor_bytes
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.walk.divergence import LOGIT_POSITIONS
from exl2flow.quant.walk.source_model import ROWS_TOGETHER
from exl2flow.quant.walk.working_memory import working_bytes

HALF, FLOAT, TOKEN = 2, 4, 8  # bytes of fp16, of fp32, of a token's id
SUBLAYER_WEIGHT = 34  # bytes per weight: read, padded, rounded, refined, decoded, packed
CORRECTED_WEIGHT = 8  # in addition: corrected targets, and one being computed
HEAD_WEIGHT = 32  # same, with one candidate at a time
MEASURED_WEIGHT = 28  # of the current projection: read, padded, errors and their products
BATCH_WEIGHT = 13  # rounded side by side: joined, reordered, codes, scale search
VARIANTS = 14  # distinct candidates of a projection where sublayers are measured
ENTRY = 1100  # bytes of a measured candidate in the two files that hold it
HESSIANS = 10  # matrices (k, k) from a Hessian to its factor
LOGITS = 6  # copies of logits: both models', their logarithms, differences
STATE_FILES = 3  # saved states: two in turn, and the one replacing either
DISTILLED = 4  # numbers per trained one in a saved state: value, two moments, best value
PASSING = 8  # copies of the activations of rows that pass together, in the widest sublayer
DECODING = 3  # bytes per weight that each thread of `compile` holds on a GPU
LIBRARIES = 1 << 28  # workspaces of a GPU's libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU; memory: bytes available to tensors."""

    name: str
    memory: int

    @classmethod
    def of(cls, device: torch.device, limit: int | None) -> Self:
        """Describe a device, limited to `limit` bytes."""
        limit_memory(device, limit)
        return cls(name=torch.cuda.get_device_name(device), memory=free_memory(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a stage needs at most, in bytes.

    memory_bytes: main memory beyond the process itself; kept_bytes: disk that stays occupied;
    passing_bytes: disk that is freed when the stage ends; pinned_bytes: hidden states that wait in
    main memory because the GPU has no room for them.
    """

    memory_bytes: int = 0
    kept_bytes: int = 0
    passing_bytes: int = 0
    gpu_memory_bytes: int = 0
    pinned_bytes: int = 0


def work_bytes(needs: Collection[Need]) -> int:
    """Return the most disk that checkpoints take: all that stays, and one stage's passing files."""
    kept = sum(need.kept_bytes for need in needs)
    return kept + max((need.passing_bytes for need in needs), default=0)


def memory_bytes(needs: Collection[Need]) -> int:
    """Return the main memory of the stage that takes most."""
    return max((need.memory_bytes for need in needs), default=0)


class _Part:
    """Sums over the matrices (k, n) of a sublayer or the head, with padded columns."""

    def __init__(self, projections: Sequence[ProjectionSpec], candidates: int, batch: int) -> None:
        sizes = [(p.in_features, padded_columns(p.out_features)) for p in projections]
        self.weights = sum(k * n for k, n in sizes)
        self.largest = max(k * n for k, n in sizes)
        self.own_squares = sum(k * k for k, _ in sizes)
        self.squares = sum(k * k for k in {p.capture: p.in_features for p in projections}.values())
        self.widest = max(max(size) for size in sizes)
        side_by_side = sorted(min(max(batch, k * n), candidates * k * n) for k, n in sizes)
        self.batches = sum(side_by_side[-2:])


class Forecast:
    """The needs of a conversion's stages.

    Main memory is forecast as if there were no GPU, except for stages that hold the whole model
    where they compute.
    """

    def __init__(self, config: ConversionConfig, spec: ModelSpec, card: Card | None) -> None:
        self.config, self.spec, self.card, self.rows = config, spec, card, config.calibration
        self.fisher = config.sensitivity.kind == "fisher"
        self.refines = isinstance(config, RefinementConfig)
        corrected = bool(config.rounding.correction) and not self.refines
        self.pairs = len(paired_rows(self.rows.rows)) if corrected else 0
        self.widths = len(single_widths(PROJECTION_OPTIONS))
        batch = gpu_batch_elements(card.memory) if card else 0
        self.parts = [
            _Part(s.projections, self.widths if self.fisher else len(candidates_for(s)), batch)
            for s in spec.sublayers
        ]
        self.parts.append(_Part((spec.head,), len(single_widths(HEAD_OPTIONS)), batch))
        self.most = max(self.parts, key=lambda part: part.squares + part.weights)
        # unpadded, as in the files
        sizes = [sum(p.in_features * p.out_features for p in s.projections) for s in spec.sublayers]
        self.decoder, self.sublayer = sum(sizes), max(sizes)
        self.head = spec.head.in_features * spec.head.out_features

    def needs(self, packed: int) -> dict[str, Need]:
        """Return the stages that take much, by name, in order; `packed`: bytes of all matrices."""
        config, rows = self.config, self.rows
        ids = TOKEN * (rows.rows * rows.row_tokens + rows.measure_rows * rows.measure_row_tokens)
        needs = {"compose": self._compose()} if rows.text == "self" else {}
        needs["tokenize"] = Need(memory_bytes=2 * ids, kept_bytes=ids)
        if self.fisher:
            needs["sensitivity"] = self._sensitivity()
        if self.refines:
            needs["refine"] = self._quantize(packed)
        else:
            if config.measurement is None:
                needs["measure"] = self._measure()
            if config.allocate.rounds:
                needs["allocate"] = self._allocate()
            needs["quantize"] = self._quantize(packed)
            if config.tune.steps:
                needs["tune"] = self._tune(packed)
        decoded = HELPERS * DECODING * max(part.largest for part in self.parts)
        return needs | {"compile": Need(**self._on_gpu(decoded))}

    def _on_gpu(self, work: int, states: int = 0) -> dict[str, int]:
        """Add libraries to the work, and the states if they fit beside it."""
        if self.card is None:
            return {}
        most = self.card.memory
        pinned = states if states + working_bytes(self.spec, most) > most else 0
        memory = min(LIBRARIES + work + states - pinned, most)
        return {"gpu_memory_bytes": memory, "pinned_bytes": pinned}

    def _compose(self) -> Need:
        """The whole model, fp16 on a GPU and fp32 on a CPU."""
        elements = Composition.of(self.spec, self.rows).elements
        if self.card is not None:
            return Need(gpu_memory_bytes=HALF * elements)
        return Need(memory_bytes=FLOAT * elements)

    def _sensitivity(self) -> Need:
        options, tokens, most = self.config.sensitivity, self.rows.row_tokens, self.most
        without_states = options.model_copy(update={"rows": 0})
        kept = sensitivity.disk_bytes(self.spec, without_states, tokens)
        work = FLOAT * (4 * most.weights + 3 * most.own_squares) + self._passing(tokens)
        return Need(
            memory_bytes=sensitivity.memory_bytes(self.spec, options, tokens),
            kept_bytes=kept,
            passing_bytes=sensitivity.disk_bytes(self.spec, options, tokens) - kept,
            **self._on_gpu(work, 3 * self._states(options.rows * tokens)),
        )

    def _measure(self) -> Need:
        """Outputs of all rows are kept beside their inputs; many candidates are rounded at once."""
        tokens, most = self.rows.measure_row_tokens, self.most
        states = self._states(self.rows.measure_rows * tokens)
        if self.fisher:  # errors are kept; each projection is rounded to all widths
            widest = max(part.largest for part in self.parts)
            batch = (BATCH_WEIGHT + FLOAT) * min(max(widest, BATCH_ELEMENTS), self.widths * widest)
            working = FLOAT * self.sublayer + MEASURED_WEIGHT * widest + batch
        else:
            batch = BATCH_WEIGHT * min(BATCH_ELEMENTS, VARIANTS * self.sublayer)
            working = SUBLAYER_WEIGHT * self.sublayer + batch
        working = max(working, self._head(tokens)) + self._shared(tokens)
        projections = sum(len(s.projections) for s in self.spec.sublayers) + 1
        work = 3 * FLOAT * most.squares + 8 * (most.batches + most.weights) + self._passing(tokens)
        return Need(
            memory_bytes=max(self._begun(states), 2 * states + working),
            kept_bytes=ENTRY * projections * len(PROJECTION_OPTIONS),
            passing_bytes=STATE_FILES * states,
            **self._on_gpu(work, (1 if self.fisher else 2) * states),
        )

    def _allocate(self) -> Need:
        """Judging keeps states of two allocations, the source, and one trial per sublayer."""
        tokens = self.rows.row_tokens
        judging = min(HELD_OUT_ROWS, self.rows.rows // 2)
        training = self.rows.rows - judging
        seen = len(range(0, training, max(1, training // HESSIAN_ROWS)))
        states = self._states((2 * seen + (3 + len(self.spec.sublayers)) * judging) * tokens)
        working = max(SUBLAYER_WEIGHT * self.sublayer, self._head(tokens)) + self._shared(tokens)
        work = working_bytes(self.spec, self.card.memory) if self.card else 0
        return Need(memory_bytes=states + working, **self._on_gpu(work))

    def _quantize(self, packed: int) -> Need:
        """Corrected targets need some states of the source beside those of the quantized model."""
        tokens, most = self.rows.row_tokens, self.most
        states, paired = (self._states(n * tokens) for n in (self.rows.rows, self.pairs))
        weight = SUBLAYER_WEIGHT + CORRECTED_WEIGHT * bool(self.pairs)
        working = max(weight * self.sublayer, self._head(tokens)) + self._shared(tokens)
        work = 5 * FLOAT * most.squares + 35 * most.weights + self._passing(tokens)
        return Need(
            memory_bytes=max(self._begun(states) + 2 * paired, states + paired + working),
            kept_bytes=packed,
            passing_bytes=STATE_FILES * (states + paired),
            **self._on_gpu(work, states + paired),
        )

    def _tune(self, packed: int) -> Need:
        """Plain tensors are trained, codes too if they have a rate; scales are negligible."""
        options, spec = self.config.tune, self.spec
        plain = sum(map(prod, plain_tensors(spec).values()))
        trained = plain - (0 if options.embedding_rate else spec.vocab_size * spec.hidden_size)
        trained += self.decoder + self.head if options.code_rate else 0
        state, working = DISTILLED * FLOAT * trained, tune_memory(spec, options)
        return Need(
            memory_bytes=state + (0 if self.card else working),
            kept_bytes=packed + 2 * plain,
            passing_bytes=STATE_FILES * state,
            gpu_memory_bytes=working if self.card else 0,
        )

    def _states(self, positions: int) -> int:
        return positions * self.spec.hidden_size * FLOAT

    def _passing(self, tokens: int) -> int:
        return PASSING * FLOAT * ROWS_TOGETHER * tokens * self.most.widest

    def _begun(self, states: int) -> int:
        """Embedding, head, and the states twice: as rows and as one tensor."""
        return 2 * states + 2 * self.spec.vocab_size * self.spec.hidden_size * FLOAT

    def _shared(self, tokens: int) -> int:
        """What every walk needs besides states and weights: a row, Hessians, Fisher factors."""
        spec, block = self.spec, self.config.sensitivity.block
        widest = max(p.in_features for s in spec.sublayers for p in s.projections)
        size = FLOAT * (8 * tokens * max(widest, spec.hidden_size) + HESSIANS * widest**2)
        if self.fisher:
            factors = [factor_bytes(s.projections, block=block) for s in spec.sublayers]
            head = factor_bytes((spec.head,), block=sensitivity.head_block(block))
            size += 2 * max(*factors, head)  # one half of each is on disk
        return size

    def _head(self, tokens: int) -> int:
        logits = min(tokens, LOGIT_POSITIONS) * self.spec.vocab_size
        return HEAD_WEIGHT * self.head + LOGITS * logits * FLOAT
