"""Upper bounds of the memory and disk that each stage needs, from shapes and options alone.

Constants count what exists at the worst moment of the code they describe. The sums were compared
with the peaks of models that are mostly hidden states, mostly wide matrices or mostly head.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.runtime.background import HELPERS
from exl2flow.core.runtime.memory import free_memory, limit_memory
from exl2flow.model import Composition, ModelSpec
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.model.layers.stream import CALIBRATION_ROWS
from exl2flow.quant.allocate.budget import decoder_numel
from exl2flow.quant.allocate.layout import carried_bytes, plain_tensors
from exl2flow.quant.allocate.stage import HELD_OUT_ROWS, HESSIAN_ROWS
from exl2flow.quant.measure.candidates import PROJECTION_OPTIONS, single_widths
from exl2flow.quant.quantize.correction import paired_rows
from exl2flow.quant.rounding.error_feedback import BATCH_ELEMENTS, gpu_batch_elements
from exl2flow.quant.sensitivity import stage as sensitivity
from exl2flow.quant.sensitivity.fisher import factor_bytes
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.walk.divergence import LOGIT_POSITIONS
from exl2flow.quant.walk.working_memory import working_bytes

HALF, FLOAT, TOKEN = 2, 4, 8  # bytes of fp16, of fp32, of a token's id
SUBLAYER_WEIGHT = 34  # bytes per weight: read, padded, rounded, refined, decoded, packed
CORRECTED_WEIGHT = 8  # in addition: corrected targets, and one being computed
BATCH_WEIGHT = 13  # rounded side by side: joined, reordered, codes, scale search
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
    passing_bytes: disk that is freed when the stage ends; output_bytes: disk of `--out`;
    pinned_bytes: hidden states that wait in main memory because the GPU has no room for them.
    """

    memory_bytes: int = 0
    kept_bytes: int = 0
    passing_bytes: int = 0
    output_bytes: int = 0
    gpu_memory_bytes: int = 0
    pinned_bytes: int = 0


def work_bytes(needs: Collection[Need]) -> int:
    """Return the most disk that checkpoints take: all that stays, and one stage's passing files."""
    kept = sum(need.kept_bytes for need in needs)
    return kept + max((need.passing_bytes for need in needs), default=0)


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
        self.token = FLOAT * spec.hidden_size  # bytes of its state
        groups, block = [s.projections for s in spec.sublayers], config.sensitivity.block
        self.factors = [factor_bytes(group, block=block) for group in groups]
        self.factors.append(factor_bytes((spec.head,), block=sensitivity.head_block(block)))
        self.projections = [p for group in groups for p in group]
        parts = [
            [(p.in_features, padded_columns(p.out_features)) for p in group]
            for group in (*groups, (spec.head,))
        ]
        *sublayers, self.head = (sum(k * n for k, n in part) for part in parts)
        self.sublayer = max(sublayers)
        self.largest = max(k * n for part in parts for k, n in part)
        self.most = max(parts, key=lambda part: sum(k * (k + n) for k, n in part))

    def needs(self, packed: int) -> dict[str, Need]:
        """Return the stages that take much, by name, in order; `packed`: bytes of all matrices."""
        config, rows = self.config, self.rows
        needs = {}
        if rows.text == "self":  # the whole model, fp16 on a GPU and fp32 on a CPU
            elements = Composition.of(self.spec, rows).elements
            on_gpu, on_cpu = (HALF * elements, 0) if self.card else (0, FLOAT * elements)
            needs["compose"] = Need(memory_bytes=on_cpu, gpu_memory_bytes=on_gpu)
        ids = TOKEN * (rows.rows * rows.row_tokens + rows.measure_rows * rows.measure_row_tokens)
        needs["tokenize"] = Need(memory_bytes=2 * ids, kept_bytes=ids)
        if self.fisher:
            needs["sensitivity"] = self._sensitivity()
        if config.measurement is None and not self.refines:
            needs["measure"] = self._measure()
        if config.allocate.rounds and not self.refines:
            needs["allocate"] = self._allocate()
        needs["refine" if self.refines else "quantize"] = self._quantize(packed)
        if config.tune.steps and not self.refines:
            needs["tune"] = self._tune(packed)
        output = packed + HALF * sum(map(prod, plain_tensors(self.spec).values()))
        output += carried_bytes(self.spec)
        decoded = self._on_gpu(HELPERS * DECODING * self.largest)
        return needs | {"compile": Need(output_bytes=output, **decoded)}

    def _sensitivity(self) -> Need:
        options, tokens, kept = self.config.sensitivity, self.rows.row_tokens, sum(self.factors)
        work = self._on_most(tokens, weight=4 * FLOAT, square=3 * FLOAT)
        return Need(
            memory_bytes=sensitivity.memory_bytes(self.spec, options, tokens),
            kept_bytes=kept,
            passing_bytes=sensitivity.disk_bytes(self.spec, options, tokens) - kept,
            **self._on_gpu(work, 3 * self.token * options.rows * tokens),
        )

    def _measure(self) -> Need:
        """Outputs of all rows are kept beside their inputs; many candidates are rounded at once.

        With Fisher factors each matrix is rounded by itself, and its errors are kept.
        """
        tokens, widths = self.rows.measure_row_tokens, len(single_widths(PROJECTION_OPTIONS))
        states = self.token * self.rows.measure_rows * tokens
        rounded = self.largest if self.fisher else self.sublayer
        batch = min(max(BATCH_ELEMENTS, self.largest), widths * rounded)
        weights = FLOAT * self.sublayer + SUBLAYER_WEIGHT * rounded
        weights += (BATCH_WEIGHT + FLOAT * self.fisher) * batch
        batch = gpu_batch_elements(self.card.memory) if self.card else 0
        two = sorted(k * n for k, n in self.most)[-2:]  # matrices at a time
        work = sum(8 * min(max(batch, size), widths * size) for size in two)
        work += self._on_most(tokens, weight=8, square=3 * FLOAT)
        return Need(
            memory_bytes=2 * states + self._working(weights, tokens),
            kept_bytes=ENTRY * (len(self.projections) + 1) * len(PROJECTION_OPTIONS),
            passing_bytes=STATE_FILES * states,
            **self._on_gpu(work, (2 - self.fisher) * states),
        )

    def _allocate(self) -> Need:
        """Judging keeps states of two allocations, the source, and one trial per sublayer."""
        tokens, judging = self.rows.row_tokens, min(HELD_OUT_ROWS, self.rows.rows // 2)
        training = self.rows.rows - judging
        seen = len(range(0, training, max(1, training // HESSIAN_ROWS)))
        rows = 2 * seen + (3 + len(self.spec.sublayers)) * judging
        working = self._working(SUBLAYER_WEIGHT * self.sublayer, tokens)
        work = working_bytes(self.spec, self.card.memory) if self.card else 0
        return Need(memory_bytes=self.token * rows * tokens + working, **self._on_gpu(work))

    def _quantize(self, packed: int) -> Need:
        """Corrected targets need some states of the source beside those of the quantized model.

        At the start the states exist twice, as rows and as one tensor, beside embedding and head.
        """
        tokens = self.rows.row_tokens
        states = self.token * (self.rows.rows + self.pairs) * tokens
        weight = SUBLAYER_WEIGHT + CORRECTED_WEIGHT * bool(self.pairs)
        working = self._working(weight * self.sublayer, tokens)
        work = self._on_most(tokens, weight=35, square=5 * FLOAT)
        return Need(
            memory_bytes=states + max(states + 2 * FLOAT * self.head, working),
            kept_bytes=packed,
            passing_bytes=STATE_FILES * states,
            **self._on_gpu(work, states),
        )

    def _tune(self, packed: int) -> Need:
        """Plain tensors are trained, codes too if they have a rate; scales are negligible."""
        options, spec = self.config.tune, self.spec
        plain, head = sum(map(prod, plain_tensors(spec).values())), spec.head
        trained = plain - (0 if options.embedding_rate else spec.vocab_size * spec.hidden_size)
        if options.code_rate:
            trained += decoder_numel(spec) + head.in_features * head.out_features
        state, working = DISTILLED * FLOAT * trained, tune_memory(spec, options)
        return Need(
            memory_bytes=state + (0 if self.card else working),
            kept_bytes=packed + 2 * plain,
            passing_bytes=STATE_FILES * state,
            gpu_memory_bytes=working if self.card else 0,
        )

    def _working(self, weights: int, tokens: int) -> int:
        """What a walk needs beside states: a sublayer's `weights` or the head, and what both share.

        Shared are the activations of a row, Hessians and Fisher factors (half of each is on disk).
        """
        widest = max(p.in_features for p in self.projections)
        logits = LOGITS * FLOAT * min(tokens, LOGIT_POSITIONS) * self.spec.vocab_size
        shared = FLOAT * (8 * tokens * widest + HESSIANS * widest**2)
        shared += 2 * max(self.factors) * self.fisher
        return shared + max(weights, SUBLAYER_WEIGHT * self.head + logits)

    def _on_most(self, tokens: int, *, weight: int, square: int) -> int:
        """Work on the greatest part in bytes: per weight, per element of Hessians, activations."""
        widest = max(max(size) for size in self.most)
        passing = PASSING * FLOAT * CALIBRATION_ROWS * tokens * widest
        return passing + sum(k * (weight * n + square * k) for k, n in self.most)

    def _on_gpu(self, work: int, states: int = 0) -> dict[str, int]:
        """Add libraries to the work, and the states if they fit beside it."""
        if self.card is None:
            return {}
        most = self.card.memory
        pinned = states if states + working_bytes(self.spec, most) > most else 0
        memory = min(LIBRARIES + work + states - pinned, most)
        return {"gpu_memory_bytes": memory, "pinned_bytes": pinned}
