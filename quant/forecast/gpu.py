"""What each stage takes of a GPU, in memory and in time, forecast from shapes and options alone.

Memory is forecast above what a run takes, time about: shares of the peak and seconds per panel are
what an H200 showed (`docs/benchmarks.md`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch

from exl2flow.core.background import HELPERS
from exl2flow.core.config import ConversionConfig
from exl2flow.core.memory import free_memory, limit_memory
from exl2flow.core.refine import RefinementConfig
from exl2flow.kernels import PANEL_ROWS
from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.exl2 import padded_columns
from exl2flow.quant.measure.candidates import (
    HEAD_OPTIONS,
    PROJECTION_OPTIONS,
    candidates_for,
    single_widths,
)
from exl2flow.quant.quantize.correction import paired_rows
from exl2flow.quant.rounding.error_feedback import gpu_batch_elements
from exl2flow.quant.sensitivity.fisher import block_size
from exl2flow.quant.sensitivity.stage import head_block
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.walk.pinned import TALL_WINDOW_ROWS, is_tall
from exl2flow.quant.walk.source_model import ROWS_TOGETHER
from exl2flow.quant.walk.working_memory import FLOAT, NARROW, working_bytes

# Operations per clock and multiprocessor of fp16 products with fp32 sums, by compute capability
OPERATIONS = {(8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096, (10, 0): 8192, (12, 0): 512}
NARROW_SHARE = 0.5  # of the peak: forward passes and Hessians, fp16
WIDE_SHARE = 0.28  # products of fp32 matrices, as TF32
BACKWARD_SHARE = 0.19  # forward and backward in fp32, as TF32
PASSES = 2.4  # forward passes of `quantize`: Hessians, the source's rows, what was quantized
FREE_PANEL = 0.25e-3  # seconds: 32 rows rounded in every batch of candidates, columns independent
GRID_PANEL = 1.4e-3  # the same with the original's search of scales
COUPLED_PANEL = 0.6e-3  # 32 rows rounded in the metric of the output factor
REFIT_PANEL, SWEEP_PANEL = 0.1e-3, 0.2e-3  # a round's refit of them, and each of its sweeps
SUBLAYER = 0.08  # seconds: what a sublayer takes beside its work
START = 1.5  # a stage: embedding, states, reading the head
LAYER_CHOICE = 0.04  # `allocate`
TUNED_STEP = 6e-11  # seconds per weight and step
TUNING = 8.0  # seconds before and after the steps
DECODED, WRITTEN = 2.5e9, 0.4e9  # bytes per second that `compile` checks and writes
SCARCE = 1.3  # times as long where states come and go, and work is done in turn
TALL_RATE = 25e9  # bytes per second of what comes from main memory and goes back
LIBRARIES = 1 << 28  # workspaces of the libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """name; flops: peak of fp16 products; processors; memory: bytes that tensors may take."""

    name: str
    flops: float
    processors: int
    memory: int

    @classmethod
    def of(cls, device: torch.device, limit: int | None) -> Self:
        """Describe a device; `limit` bounds what may be used of it."""
        limit_memory(device, limit)
        found = torch.cuda.get_device_properties(device)
        known = [kind for kind in OPERATIONS if kind <= (found.major, found.minor)]
        per_clock = OPERATIONS[max(known)] if known else min(OPERATIONS.values())
        return cls(
            name=found.name,
            flops=1e3 * found.clock_rate * found.multi_processor_count * per_clock,
            processors=found.multi_processor_count,
            memory=free_memory(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """What a stage needs of a card.

    memory: bytes at most. seconds: about. least: seconds of its products at the card's peak.
    operations: of those products. states_stay: on the card, not in pinned memory.
    """

    memory: int
    seconds: float
    least: float = 0.0
    operations: float = 0.0
    states_stay: bool = True

    def to_json(self) -> dict[str, object]:
        """Return the need as JSON."""
        return {
            "gpu_memory_bytes": self.memory,
            "seconds": round(self.seconds, 1),
            "states_on_gpu": self.states_stay,
        }


@dataclass(slots=True)
class _Work:
    """Operations of fp16 products and of fp32 ones as TF32, and seconds beside them."""

    narrow: float = 0.0
    wide: float = 0.0
    beside: float = 0.0


class _Part:
    """A sublayer or the head, in sums over its projections."""

    def __init__(
        self, projections: Sequence[ProjectionSpec], block: int, candidates: int, card: Card
    ) -> None:
        sizes = [(p.in_features, padded_columns(p.out_features)) for p in projections]
        read = {p.capture: p.in_features for p in projections}
        self.weights = sum(k * n for k, n in sizes)
        self.largest = max(k * n for k, n in sizes)
        self.squares = sum(k * k for k in read.values())
        self.own_squares = sum(k * k for k, _ in sizes)
        self.cubes = sum(k * k * n for k, n in sizes)
        self.widest = max(max(size) for size in sizes)
        self.candidates = candidates
        batch = gpu_batch_elements(card.memory)
        self.batch = [min(max(batch, k * n), candidates * k * n) for k, n in sizes]
        self.free_panels = sum(
            k // PANEL_ROWS * -(-candidates * k * n // max(batch, k * n)) for k, n in sizes
        )
        self.tall_pass = sum(  # seconds in which every window of a matrix reaches all others
            8 * k * n * (k / TALL_WINDOW_ROWS) / TALL_RATE
            for k, n in sizes
            if is_tall(k * n, card.memory)
        )
        self.coupled_panels = 0
        for (_, k, n), run in groupby(
            (p.capture, *size) for p, size in zip(projections, sizes, strict=True)
        ):
            blocks = len(list(run)) * n // block_size(n, block)
            self.coupled_panels += k // PANEL_ROWS * -(-blocks // card.processors)


def gpu_needs(
    config: ConversionConfig, spec: ModelSpec, card: Card, *, output: int
) -> dict[str, GpuNeed]:
    """Return what the stages of a conversion need of a card, by name, in order.

    Args:
        config: the conversion.
        spec: its source.
        card: where it runs.
        output: bytes of the result.
    """
    return _Forecast(config, spec, card).needs(output)


class _Forecast:
    def __init__(self, config: ConversionConfig, spec: ModelSpec, card: Card) -> None:
        self.config, self.spec, self.card = config, spec, card
        block, widths = config.sensitivity.block, len(single_widths(PROJECTION_OPTIONS))
        self.fisher = config.sensitivity.kind == "fisher"
        self.parts = [
            _Part(s.projections, block, widths if self.fisher else len(candidates_for(s)), card)
            for s in spec.sublayers
        ]
        head_widths = len(single_widths(HEAD_OPTIONS))
        self.head = _Part((spec.head,), head_block(block), head_widths, card)
        self.most = max([*self.parts, self.head], key=lambda part: part.squares + part.weights)

    def needs(self, output: int) -> dict[str, GpuNeed]:
        """See `gpu_needs`."""
        config, needs = self.config, {"tokenize": GpuNeed(memory=0, seconds=1.0)}
        if self.fisher:
            needs["sensitivity"] = self._sensitivity()
        if not isinstance(config, RefinementConfig):
            if config.measurement is None:
                needs["measure"] = self._measure()
            needs["allocate"] = self._allocate()
        needs["quantize"] = self._quantize()
        weights = sum(part.weights for part in (*self.parts, self.head))
        if config.tune.steps:
            seconds = TUNING + config.tune.steps * weights * TUNED_STEP
            needs["tune"] = GpuNeed(memory=tune_memory(self.spec, config.tune), seconds=seconds)
        seconds = NARROW * weights / DECODED + output / WRITTEN
        memory = LIBRARIES + HELPERS * 3 * max(part.largest for part in (*self.parts, self.head))
        needs["compile"] = GpuNeed(memory=memory, seconds=seconds)
        return needs

    def _need(
        self, work: _Work, states: int, beside: float, *, wide_share: float = WIDE_SHARE
    ) -> GpuNeed:
        """Add states to what is needed beside them, if they fit there."""
        flops = self.card.flops
        seconds = work.narrow / (NARROW_SHARE * flops) + work.wide / (wide_share * flops)
        seconds += work.beside
        stay = states + working_bytes(self.spec, self.card.memory) <= self.card.memory
        memory = LIBRARIES + int(beside) + states * stay
        seconds = START + seconds * (1 if stay else SCARCE)
        return GpuNeed(
            memory=min(memory, self.card.memory),
            seconds=seconds,
            least=(work.narrow + 2 * work.wide) / flops,
            operations=work.narrow + work.wide,
            states_stay=stay,
        )

    def _states(self, rows: int, tokens: int) -> int:
        return FLOAT * rows * tokens * self.spec.hidden_size

    def _passing(self, tokens: int) -> int:
        """Some rows' activations on their way through the widest sublayer."""
        return 8 * FLOAT * ROWS_TOGETHER * tokens * self.most.widest

    def _sensitivity(self) -> GpuNeed:
        rows, tokens = self.config.sensitivity.rows, self.config.calibration.row_tokens
        work = _Work()
        for part in (*self.parts, self.head):  # three times forward, once backward; sums
            work.wide += rows * tokens * (10 * part.weights + 2 * part.own_squares)
        beside = FLOAT * (4 * self.most.weights + 3 * self.most.own_squares)
        return self._need(
            work,
            3 * self._states(rows, tokens),
            beside + self._passing(tokens),
            wide_share=BACKWARD_SHARE,
        )

    def _measure(self) -> GpuNeed:
        rows, most, work = self.config.calibration, self.most, _Work()
        positions = rows.measure_rows * rows.measure_row_tokens
        for part in (*self.parts, *([self.head] if self.fisher else [])):
            work.narrow += 2 * positions * (part.weights + part.squares)
            work.beside += SUBLAYER
            work.wide += part.candidates * part.cubes  # errors fed back
            work.beside += part.candidates * part.tall_pass / 2
            if self.fisher:
                work.wide += 4 * part.candidates * part.cubes  # two prices
                work.beside += FREE_PANEL * part.free_panels + COUPLED_PANEL * part.coupled_panels
            else:
                work.narrow += 2 * positions * part.weights * part.candidates
                work.beside += GRID_PANEL * part.free_panels
        beside = 3 * FLOAT * most.squares + 8 * sum(sorted(most.batch)[-2:]) + 8 * most.weights
        states = (1 if self.fisher else 2) * self._states(
            rows.measure_rows, rows.measure_row_tokens
        )
        return self._need(work, states, beside + self._passing(rows.measure_row_tokens))

    def _allocate(self) -> GpuNeed:
        rounds, layers = self.config.allocate.rounds, len(self.parts) / 2
        work = _Work(beside=LAYER_CHOICE * layers)
        if not rounds:
            return GpuNeed(memory=0, seconds=work.beside)
        panels = sum(part.coupled_panels for part in (*self.parts, self.head))
        work.beside += (rounds + 1) * (3 * FREE_PANEL * panels + SUBLAYER * 2 * layers)
        return self._need(work, 0, working_bytes(self.spec, self.card.memory))

    def _quantize(self) -> GpuNeed:
        rows, rounding, most = self.config.calibration, self.config.rounding, self.most
        pairs = len(paired_rows(rows.rows)) if rounding.correction else 0
        panel, steps, passes = FREE_PANEL, 1, 0.5  # products with the Hessian or its factor
        if rounding.rounds:
            panel = COUPLED_PANEL
            panel += rounding.rounds * (REFIT_PANEL + rounding.sweeps * SWEEP_PANEL)
            steps += 2 + 2 * rounding.rounds * (1 + rounding.sweeps)
            passes += rounding.rounds * (1 + rounding.sweeps)
        work = _Work()
        for part in (*self.parts, self.head):
            work.narrow += 2 * rows.rows * rows.row_tokens * (PASSES * part.weights + part.squares)
            work.wide += steps * part.cubes + 2 * pairs * rows.row_tokens * part.squares
            work.beside += SUBLAYER + panel * part.coupled_panels + passes * part.tall_pass
        beside = 5 * FLOAT * most.squares + 35 * most.weights + self._passing(rows.row_tokens)
        return self._need(work, self._states(rows.rows + pairs, rows.row_tokens), beside)
