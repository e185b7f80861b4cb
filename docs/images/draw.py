"""Draw the figures of `docs/concepts/quality.md` that plot numbers.

    python docs/images/draw.py             # all; some minutes on one core
    python docs/images/draw.py rows …      # some of them

Numbers are those of the demo model, but for `rows`, which shows two columns of a made-up metric.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exl2flow.core.options.config import ConversionConfig, ScaleSearch
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import read_json, read_tensors
from exl2flow.core.store.stage import Pipeline
from exl2flow.kernels import Group, get_ops, times_output
from exl2flow.model import DenseLinear, Linear, ProjectionSpec, QuantizedMatrix
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.allocate.budget import ALLOCATION_FILE
from exl2flow.quant.measure.candidates import parse_params
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE, read_measurement
from exl2flow.quant.quantize.stage import install, sublayer_file
from exl2flow.quant.rounding.descent import Metric, refine
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    padded_weight,
    round_matrices,
)
from exl2flow.quant.rounding.hessian import HessianFactor, collect_hessians, factor, mixed
from exl2flow.quant.sensitivity.fisher import Factors, estimate
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.tokenize.stage import split_rows
from exl2flow.quant.tune.stage import TUNING_FILE
from exl2flow.quant.walk.divergence import divergence
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import advance

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parents[1] / "demo" / "model"
TARGET_BYTES = 4_100_000  # of the allocation that is shown
SETTINGS = ("2 g64", "3 g128", "4 g128", "5 g128")
STARTS: dict[
    str, tuple[ScaleSearch, bool]
] = {  # label: (search of the scales, whether rows are rounded in the outputs' metric)
    "one multiplier per group, then steps": ("grid", False),
    "a scale per column, then steps": ("column", False),
    "rows rounded in the metric O, then steps": ("column", True),
}
ROUNDS = 5
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
COLOURS = ("#1f77b4", "#17a2b8", "#6f42c1", "#2e8b57", "#b5482f", "#e08a3c", "#8c564b", "#333333")
STYLE = {
    "svg.hashsalt": "exl2flow",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A projection's weight fp32 (k, n) and what rounding it needs."""

    spec: ProjectionSpec
    linear: Linear
    weight: torch.Tensor
    factors: Factors
    item: HessianFactor
    output: torch.Tensor

    def rounded(self, cell: str, search: ScaleSearch, *, in_metric: bool) -> RoundedMatrix:
        """Return the matrix rounded as a cell of the candidates' tables says."""
        job = RoundingJob(
            weight=self.weight,
            params=parse_params(cell),
            output=self.output if in_metric else None,
        )
        return next(round_matrices([job], self.item, search=search))

    def cost(self, rounded: RoundedMatrix) -> float:
        """Return the estimated cost in nats per token."""
        return estimate(rounded.dequantize().float() - self.weight, self.factors)

    def objective(self, rounded: RoundedMatrix) -> float:
        """Return tr(O Eᵀ H E) in the damped metric of rounding."""
        error = (rounded.dequantize().float() - self.weight)[self.item.perm]
        metric = Metric(hessian=self.item.hessian.matrix(), output=self.output)
        return float(((metric.hessian @ error) * times_output(error, metric.output)).sum())


def run_until(pipeline: Pipeline, last: str) -> Path:
    """Run the stages up to one of them and return its folder."""
    for name in pipeline.stages:
        pipeline.run(name, progress=silent)
        if name == last:
            break
    return pipeline.path(last)


class Demo:
    """The demo model with its factors and Hessians."""

    def __init__(self, folder: Path) -> None:
        self.config = ConversionConfig(
            source=SOURCE,
            out=folder / "out",
            work_root=folder / "work",
            target_bytes=TARGET_BYTES,
            device="cpu",
            calibration={
                "rows": 32,
                "row_tokens": 512,
                "measure_rows": 16,
                "measure_row_tokens": 512,
            },
        )
        self.pipeline = open_pipeline(self.config, STAGES)
        self.model = SourceModel.open(self.config, "cpu")

    def stage(self, last: str) -> Path:
        """Run the stages up to one of them and return its folder."""
        return run_until(self.pipeline, last)

    @cached_property
    def held_out(self) -> torch.Tensor:
        """Rows that no Hessian has seen, int64 (rows, t)."""
        return split_rows(self.stage("tokenize"), 8)[1]

    @cached_property
    def matrices(self) -> list[Matrix]:
        """All matrices of the decoder."""
        options = self.config.rounding
        folder = self.stage("sensitivity")
        with torch.no_grad():
            states = self.model.initial_states(split_rows(self.stage("tokenize"), 8)[0])
            made = []
            for spec in self.model.spec.sublayers:
                sublayer = self.model.sublayer(spec)
                factors = FactorFiles(folder, "cpu").read(spec.index)
                hessians, outputs = collect_hessians(sublayer, states)
                for row, output in outputs.items():
                    states[row] = output
                for p in spec.projections:
                    hessian = mixed(
                        hessians[p.capture], factors[p.name].input, options.fisher_share
                    )
                    made.append(
                        Matrix(
                            spec=p,
                            linear=sublayer.linears[p.name],
                            weight=padded_weight(sublayer.linears[p.name]),
                            factors=factors[p.name],
                            item=factor(hessian, damping=options.damping, name=p.key),
                            output=factors[p.name].output.damped(options.output_damping).blocks,
                        )
                    )
        return made

    @torch.no_grad()
    def final(self, replaced: dict[str, Linear]) -> torch.Tensor:
        """Return what the head reads on the held-out rows, with some matrices replaced."""
        states = self.model.initial_states(self.held_out)
        for spec in self.model.spec.sublayers:
            sublayer = self.model.sublayer(spec)
            for p in spec.projections:
                sublayer.linears[p.name] = replaced.get(p.key, sublayer.linears[p.name])
            advance(sublayer, states)
        return torch.stack([self.model.head().normed(row[None])[0] for row in states])


def draw_estimate(demo: Demo, axes: Axes) -> None:
    """Estimated against measured cost of every matrix, quantized alone."""
    head = demo.model.head().linear
    reference = demo.final({}).flatten(0, 1)
    for cell, colour in zip(SETTINGS, ("#b5482f", "#e08a3c", "#2e8b57", "#1f77b4"), strict=True):
        found: dict[str, Linear] = {}
        points = []
        for matrix in demo.matrices:
            rounded = matrix.rounded(cell, "column", in_metric=False)
            dense = DenseLinear(
                rounded.dequantize().T.float().contiguous(),
                matrix.linear.bias,
                out_features=len(matrix.linear.weight),
            )
            found[matrix.spec.key] = dense
            alone = demo.final({matrix.spec.key: dense}).flatten(0, 1)
            points.append((matrix.cost(rounded), divergence(head, reference, head, alone)))
        estimated, measured = np.array(points).T
        together = divergence(head, reference, head, demo.final(found).flatten(0, 1))
        logs = np.log(points).T
        print(
            f"{cell}: correlation of logs {np.corrcoef(logs)[0, 1]:.4f}, "
            f"estimated / measured {np.exp((logs[0] - logs[1]).mean()):.3f}, "
            f"all together / sum of estimates {together / estimated.sum():.3f}, "
            f"/ sum of measured {together / measured.sum():.3f}"
        )
        axes.loglog(estimated, measured, "o", color=colour, markersize=3.5, label=cell)
    low, high = 3e-7, 3e-1
    axes.plot([low, high], [low, high], color="#888888", linewidth=0.8, zorder=0)
    axes.set_xlabel("estimated cost, nats per token")
    axes.set_ylabel("measured KL divergence, nats per token")
    axes.legend(title="bits, group size", loc="upper left")


def draw_columns(demo: Demo, axes: Axes) -> None:
    """Error of three columns of a group over the step, and where each search puts it."""
    matrix = next(m for m in demo.matrices if m.spec.key.endswith("2.mlp.gate_proj"))
    bits, rows, ops = 3, 64, get_ops("cpu")
    x = matrix.weight[matrix.item.perm][:rows]  # (rows, n)
    weights = matrix.item.upper.diagonal()[:rows].reciprocal().square()
    fits = x.abs().amax(dim=0) / ((2**bits - 1) / 2)  # steps at which codes just span the column
    groups = [Group(bits=bits, start=0, rows=rows)]
    own = ops.decode_scales(*ops.search_columns(x[None], groups, weights))[0].float() / fits
    grid = ops.decode_scales(*ops.search_grid(x[None], groups))[0].float() / fits
    order = own.argsort()
    shown = [int(order[len(order) * part // 20]) for part in (1, 10, 19)]
    steps = torch.linspace(0.45, 1.15, 141)
    for name, column, colour in zip("ABC", shown, COLOURS[3:6], strict=True):
        curve = torch.stack([_error(x[:, column], s * fits[column], bits, weights) for s in steps])
        least = float(curve.min())
        axes.plot(steps, curve / least, color=colour, linewidth=1.2, label=f"column {name}")
        for search, marker in ((grid, "s"), (own, "o")):
            at = search[column]
            error = _error(x[:, column], at * fits[column], bits, weights) / least
            axes.plot(
                at,
                error,
                marker,
                color=colour,
                markerfacecolor="none" if marker == "s" else colour,
                markersize=6,
            )
    axes.plot([], [], "s", color="#555555", markerfacecolor="none", label="one multiplier")
    axes.plot([], [], "o", color="#555555", label="own scale code")
    axes.set_ylim(0.9, 3)
    axes.set_xlabel("step / step at which the column's largest weight just fits")
    axes.set_ylabel("weighted error / least possible")
    axes.legend(loc="upper center", ncols=2)


def _error(x: torch.Tensor, step: torch.Tensor, bits: int, weights: torch.Tensor) -> torch.Tensor:
    half = 2 ** (bits - 1)
    return (weights * (x - step * (x / step).round().clamp(-half, half - 1)).square()).sum()


def draw_rows(demo: Demo, axes: Axes) -> None:
    """Two columns of a row: the nearest codes, and better ones in a metric that couples them."""
    target, metric = np.array([0.44, 0.40]), np.array([[1.0, 0.8], [0.8, 1.0]])
    nearest, better = np.array([0, 0]), np.array([1, 0])

    def cost(at: np.ndarray) -> np.ndarray:
        return np.einsum("...i,ij,...j", at - target, metric, at - target)

    grid = np.stack(np.meshgrid(np.linspace(-1.5, 2.5, 400), np.linspace(-1.2, 1.9, 400)), -1)
    codes = np.stack(np.meshgrid(range(-1, 3), range(-1, 2)), -1).reshape(-1, 2)
    axes.plot(*codes.T, "o", color="#bbbbbb", markersize=5)
    axes.plot(*target, "x", color="#333333", markersize=8, markeredgewidth=1.5)
    axes.annotate("wanted", target, (-8, 8), textcoords="offset points", ha="right")
    for name, at, colour, place, side in (
        ("nearest codes", nearest, "#b5482f", (-8, -26), "right"),
        ("after descent", better, "#2e8b57", (10, -8), "left"),
    ):
        axes.contour(
            grid[..., 0],
            grid[..., 1],
            cost(grid),
            levels=[float(cost(at))],
            colors=[colour],
            linewidths=1,
        )
        axes.plot(*at, "o", color=colour, markersize=7)
        axes.annotate(
            f"{name}\ncost {cost(at):.2f}",
            at,
            place,
            textcoords="offset points",
            color=colour,
            ha=side,
            bbox={"color": "white", "pad": 1},
        )
    gap = np.array([0.07, 0])
    axes.annotate(
        "", better - gap, nearest + gap, arrowprops={"arrowstyle": "->", "color": "#555555"}
    )
    axes.set_aspect("equal")
    axes.set_xticks(range(-1, 3))
    axes.set_yticks(range(-1, 2))
    axes.set_xlabel("column 1, in codes")
    axes.set_ylabel("column 2, in codes")


def draw_refine(demo: Demo, axes: Axes) -> None:
    """The objective after each round of refit and descent, from three beginnings."""
    colours = ("#b5482f", "#e08a3c", "#2e8b57")
    curves: dict[str, list[list[float]]] = {label: [] for label in STARTS}
    for matrix in demo.matrices:
        metric = Metric(hessian=matrix.item.hessian.matrix(), output=matrix.output)
        for label, (search, in_metric) in STARTS.items():
            rounded = matrix.rounded("3 g128", search, in_metric=in_metric)
            curve = [matrix.objective(rounded)]
            for _ in range(ROUNDS):
                rounded = refine(rounded, matrix.weight, metric, rounds=1, sweeps=2)
                curve.append(matrix.objective(rounded))
            curves[label].append(curve)
    first = np.array(curves[next(iter(STARTS))])[:, :1]
    finals = {label: np.array(found)[:, -1] for label, found in curves.items()}
    for (label, found), colour in zip(curves.items(), colours, strict=True):
        shown = np.exp(np.log(np.array(found) / first).mean(axis=0))
        print(label, shown.round(4), "never rises:", bool((np.diff(found) <= 0).all()))
        axes.plot(shown, "o-", color=colour, markersize=4, label=label)
    *others, best = finals.values()
    print(f"the last is least on {int((best < np.minimum(*others)).sum())} of {len(best)} matrices")
    axes.set_ylim(0.5, 1.05)
    axes.set_xlabel("rounds of refit and descent")
    axes.set_ylabel("objective, mean over matrices")
    axes.legend(loc="upper right")


@torch.no_grad()
def draw_correction(demo: Demo, axes: Axes) -> None:
    """How far states on held-out rows are from the source's after every sublayer."""
    names = [sublayer.name.removeprefix("model.layers.") for sublayer in demo.model.spec.sublayers]
    source = demo.model.initial_states(demo.held_out)
    expected = []
    for spec in demo.model.spec.sublayers:
        advance(demo.model.sublayer(spec), source)
        expected.append(source.clone())
    for strength, colour in ((0.0, "#b5482f"), (0.5, "#2e8b57")):
        config = demo.config.model_copy(
            update={
                "rounding": demo.config.rounding.model_copy(update={"correction": strength}),
                "target_bytes": None,
                "bpw": 3.0,
            }
        )
        folder = run_until(open_pipeline(config, STAGES), "quantize")
        states, errors = demo.model.initial_states(demo.held_out), []
        for spec, wanted in zip(demo.model.spec.sublayers, expected, strict=True):
            sublayer = demo.model.sublayer(spec)
            tensors = read_tensors(folder / sublayer_file(spec))
            for p in spec.projections:
                install(sublayer, p, QuantizedMatrix.from_tensors(p.key, tensors))
            advance(sublayer, states)
            errors.append(float((states - wanted).norm() / wanted.norm()))
        print("correction", strength, [round(error, 4) for error in errors])
        axes.plot(errors, "o-", color=colour, markersize=4, label=f"strength {strength:g}")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("relative error of the states")
    axes.legend(loc="upper left")


def draw_allocation(demo: Demo, axes: Axes) -> None:
    """The cost of every candidate of every matrix, and the chosen ones."""
    spec = demo.model.spec
    chosen = read_json(demo.stage("allocate") / ALLOCATION_FILE)["choice"]
    measurement = read_measurement(demo.stage("measure") / MEASUREMENT_FILE, spec)
    projections = {p.key: p for s in spec.sublayers for p in s.projections} | {
        spec.head.key: spec.head
    }
    slots = {**measurement.decoder, spec.head.key: measurement.head}
    labelled = set()
    for key, results in slots.items():
        numel = projections[key].in_features * projections[key].out_features
        name = key.rpartition(".")[2]
        colour = COLOURS[KINDS.index(name)]
        points = sorted((r.total_bits / numel, r.nats or 0.0) for r in results)
        front = [p for i, p in enumerate(points) if all(p[1] < q[1] for q in points[:i])]
        axes.plot(*zip(*front, strict=True), color=colour, linewidth=0.8, alpha=0.7)
        entry = chosen[key]
        axes.plot(
            entry["total_bits"] / numel,
            entry["nats"],
            "o",
            color=colour,
            markersize=5,
            label=None if name in labelled else name.removesuffix("_proj"),
        )
        labelled.add(name)
    axes.set_yscale("log")
    axes.set_xlim(2, 7)
    axes.set_ylim(3e-6, 3e-1)
    axes.set_xlabel("bits per weight of the matrix")
    axes.set_ylabel("cost, nats per token")
    axes.legend(ncols=4, loc="upper right")


def draw_training(demo: Demo, axes: Axes) -> None:
    """The divergence on the rows that judge while scales, or scales and codes, are trained."""
    settings = (("scales and norms", 0.0, "#b5482f"), ("and codes", 0.15, "#2e8b57"))
    steps, tokens = 200, 2048
    for label, rate, colour in settings:
        tune = {"steps": steps, "tokens": tokens, "rows": 400, "interval": 20, "code_rate": rate}
        values = demo.config.model_dump() | {"target_bytes": None, "bpw": 3.0, "tune": tune}
        folder = run_until(open_pipeline(ConversionConfig(**values), STAGES), "tune")
        found = read_json(folder / TUNING_FILE)["judgements"]
        weights = sum(p.numel for s in demo.model.spec.sublayers for p in s.projections)
        shown = [(step * tokens / weights, kl / found[0][1]) for step, kl in found]
        print(label, [f"{x:.3f}: {y:.3f}" for x, y in shown])
        axes.plot(*zip(*shown, strict=True), "o-", color=colour, markersize=4, label=label)
    axes.set_xlabel("tokens per weight")
    axes.set_ylabel("KL divergence over the first")
    axes.legend(loc="upper right")


FIGURES: dict[str, tuple[Callable[[Demo, Axes], None], tuple[float, float]]] = {
    "estimate": (draw_estimate, (5.0, 3.8)),
    "columns": (draw_columns, (6.0, 3.4)),
    "rows": (draw_rows, (5.2, 3.8)),
    "refine": (draw_refine, (6.0, 3.4)),
    "correction": (draw_correction, (6.0, 3.2)),
    "allocation": (draw_allocation, (6.0, 3.6)),
    "training": (draw_training, (6.0, 3.2)),
}


def main(names: list[str]) -> None:
    """Write the figures that are named, or all, beside this file."""
    with tempfile.TemporaryDirectory() as folder, rc_context(STYLE):
        demo = Demo(Path(folder))
        for name in names or FIGURES:
            draw, size = FIGURES[name]
            figure = Figure(figsize=size, layout="constrained")
            draw(demo, figure.add_subplot())
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
