"""Plots of one model and of several as SVG text; equal figures give equal bytes."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from exl2flow.core import words
from exl2flow.inference.report.comparison import Compared, by_series
from exl2flow.inference.report.costs import MatrixCost, matrix_costs, total_nats
from exl2flow.inference.scoring.intervals import Interval

MARKED_COLOR = "#222222"
MOST_NAMES = 64  # sublayers named on an axis; if there are more, every second, third …
# label, place on the first axis, KL divergence, its interval
Point = tuple[str, float, float, Interval | None]
Place = tuple[Literal["left", "right"], tuple[float, float]]  # of a label; offset in points

BITS_COLOR, ERROR_COLOR, PLAIN_COLOR = "#9db8d2", "#b5482f", "#777777"
COLORS = ("#2f6db5", "#b5482f", "#3b8f5a", "#8a5aa8", "#c08a1e", "#4aa3a8", "#b04f80")
MARKERS = "os^Dv<>"
# Labels of one series stand above its falling curve, of the next one below
LABEL_PLACES: tuple[Place, ...] = (("left", (4, 3)), ("right", (-4, -8)))
LEGEND_ROOM = 1.15  # height of a panel over its highest bar
LABEL_SIZE = 7.5  # points; readable on a phone at natural size
BAR_WIDTH = 0.8  # of intervals, thinner than lines
TICKS = (1, 2, 5)  # times powers of ten, on logarithmic axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Costs in nats and relative errors measured before quantization, by sublayer."""

    nats: Mapping[str, float] = field(default_factory=dict)
    rel_err: Mapping[str, float] = field(default_factory=dict)


def render_plot(report: Mapping[str, Any]) -> str:
    """Plot bits and errors by sublayer, and the costs of errors if they are known."""
    title = f"KL divergence {words.divergence(report['score']['kl_divergence'])} nats"
    if (predicted := report.get("predicted_kl")) is not None:
        title += f", estimated {words.divergence(predicted)}"
    return render_errors(report["layers"], Measured(), title)


def render_errors(layers: Sequence[Mapping[str, Any]], measured: Measured, title: str = "") -> str:
    """Plot the same with the values measured before quantization."""
    costs = matrix_costs(layers)
    is_priced = total_nats(costs) is not None
    names = [str(layer["name"]) for layer in layers]
    with _style():
        figure = Figure(figsize=(8, 5.4 if is_priced else 3.2), layout="constrained")
        panels = figure.subplots(1 + is_priced, squeeze=False, sharex=True)[:, 0]
        _draw_bits(panels[0], layers, [measured.rel_err.get(name) for name in names])
        if is_priced:
            _draw_costs(panels[1], names, costs, [measured.nats.get(name) for name in names])
        named = range(0, len(names), 1 + (len(names) - 1) // MOST_NAMES)
        labels = [words.short(names[index]) for index in named]
        panels[-1].set_xticks(named, labels, rotation=90, fontsize=LABEL_SIZE)
        panels[-1].set_xlim(-0.6, len(layers) - 0.4)
        panels[0].set_title(title)
        return _as_svg(figure)


def _draw_bits(
    axes: Axes, layers: Sequence[Mapping[str, Any]], measured: Sequence[float | None]
) -> None:
    """Draw bits per weight as bars, and relative errors as a line."""
    axes.bar(range(len(layers)), [layer["bpw"] for layer in layers], color=BITS_COLOR)
    axes.set_ylabel("bits per weight")
    errors = axes.twinx()
    errors.plot([layer["rel_err"] for layer in layers], "o-", color=ERROR_COLOR, markersize=3)
    errors.set_ylabel("relative error", color=ERROR_COLOR)
    if _mark(errors, measured):
        errors.legend(loc="upper right", fontsize=LABEL_SIZE, frameon=False)
    errors.set_ylim(bottom=0)


def _mark(axes: Axes, measured: Sequence[float | None]) -> bool:
    """Mark the values measured before; return whether there are any."""
    known = [(index, value) for index, value in enumerate(measured) if value is not None]
    places, values = [index for index, _ in known], [value for _, value in known]
    if known:
        axes.plot(places, values, "_", color=MARKED_COLOR, markersize=9, label="measured before")
    return bool(known)


def _draw_costs(
    axes: Axes,
    sublayers: list[str],
    costs: Sequence[MatrixCost],
    measured: Sequence[float | None],
) -> None:
    """Draw estimated costs as bars, stacked by matrix."""
    names = list(dict.fromkeys(cost.name for cost in costs))
    filled = [0.0] * len(sublayers)
    for index, name in enumerate(names):
        places = [sublayers.index(cost.sublayer) for cost in costs if cost.name == name]
        heights = [cost.nats or 0.0 for cost in costs if cost.name == name]
        axes.bar(
            places,
            heights,
            bottom=[filled[place] for place in places],
            color=COLORS[index % len(COLORS)] if index < len(COLORS) else PLAIN_COLOR,
            label=name,
        )
        for place, height in zip(places, heights, strict=True):
            filled[place] += height
    axes.set_ylabel("estimated cost (nats)")
    _mark(axes, measured)
    axes.set_ylim(0, LEGEND_ROOM * max([*filled, *(m or 0.0 for m in measured)]) or None)
    axes.legend(ncols=9, loc="upper center", fontsize=6.5, frameon=False)


def render_comparison(models: Sequence[Compared]) -> str:
    """Plot KL divergence against bits per weight and against size; one point per model.

    Bars are 95 % intervals, where they are known.

    Models without a positive divergence are left out, because its axis is logarithmic. Models that
    are not EXL2 have no bits per weight and appear in the second panel only.
    """
    with _style():
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        bits, size = figure.subplots(1, 2, sharey=True)
        unit, width = words.unit(max((model.bytes for model in models), default=0))
        for index, (series, members) in enumerate(by_series(models).items()):
            drawn = [
                (m, m.kl, m.intervals.kl_divergence if m.intervals else None)
                for m in members
                if m.kl
            ]
            style = {
                "color": COLORS[index % len(COLORS)] if series else PLAIN_COLOR,
                "marker": MARKERS[index % len(MARKERS)],
                "linestyle": "-" if series else "none",
                "label": series or "others",
            }
            place = LABEL_PLACES[index % len(LABEL_PLACES)]
            by_bits = [(m.label, m.bpw, kl, sure) for m, kl, sure in drawn if m.bpw is not None]
            by_size = [(m.label, m.bytes / width, kl, sure) for m, kl, sure in drawn]
            _draw_series(bits, by_bits, style, place)
            _draw_series(size, by_size, style, place)
        bits.set_ylabel("KL divergence from the source (nats)")
        bits.set_xlabel("bits per weight of the layers' matrices")
        size.set_xlabel(f"weights on disk ({unit})")
        for axes in (bits, size):
            _finish(axes)
        return _as_svg(figure)


def _draw_series(axes: Axes, points: Sequence[Point], style: dict[str, Any], place: Place) -> None:
    """Draw labelled points from left to right, with bars for their intervals.

    The style says whether a line joins them.
    """
    ordered = sorted(points, key=lambda point: point[1])
    if not ordered:
        return
    alignment, offset = place
    axes.plot([p[1] for p in ordered], [p[2] for p in ordered], markersize=4, **style)
    for label, x, kl, sure in ordered:
        if sure is not None:
            axes.vlines(x, *sure, color=style["color"], linewidth=BAR_WIDTH)
        axes.annotate(
            label,
            (x, kl),
            xytext=offset,
            ha=alignment,
            textcoords="offset points",
            fontsize=LABEL_SIZE,
            color=style["color"],
        )


def _finish(axes: Axes) -> None:
    """Set scale, grid and legend of a panel; without points, say so instead."""
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing to show", ha="center", transform=axes.transAxes)
        return
    axes.set_yscale("log")
    axes.margins(x=0.15, y=0.1)
    axes.yaxis.set_major_locator(LogLocator(subs=TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, alpha=0.25, linewidth=0.5)
    axes.legend(fontsize=7, frameon=False)


def _style() -> AbstractContextManager[None]:
    return rc_context({"svg.hashsalt": "exl2flow", "svg.fonttype": "none", "font.size": 8})


def _as_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
