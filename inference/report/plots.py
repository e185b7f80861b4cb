"""Plots of one model and of several as SVG text; equal figures give equal bytes."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from exl2flow.core import words
from exl2flow.core.reports import (
    Interval,
    Json,
    LayerExperts,
    MatrixReport,
    SublayerReport,
    matrices_of,
    total_nats,
)
from exl2flow.inference.report.blocks import by_block, by_role, role_of
from exl2flow.inference.report.comparison import Compared, by_series

MARKED_COLOR = "#222222"
MOST_LAYERS = 32  # named beside a heat map
MOST_NAMES = 64  # sublayers named on an axis; if there are more, every second, third …
# label, place on the first axis, KL divergence, its interval
Point = tuple[str, float, float, Interval | None]
Place = tuple[Literal["left", "right"], tuple[float, float]]  # of a label; offset in points

BITS_COLOR, ERROR_COLOR, PLAIN_COLOR = "#9db8d2", "#b5482f", "#777777"
COLORS = ("#2f6db5", "#b5482f", "#3b8f5a", "#8a5aa8", "#c08a1e", "#4aa3a8", "#b04f80")
MARKERS = "os^Dv<>"
# Labels of one series stand above its falling curve, of the next one below
LABEL_PLACES: tuple[Place, ...] = (("left", (4, 3)), ("right", (-4, -8)))
LEGEND_ROOM = 0.2  # above the highest bar, for each line of a legend
SHORT_NAME = 9  # letters; of names that are no longer, seven fit into a line of a legend
LABEL_SIZE = 11  # of all texts, in units of the SVG; readable on a phone at natural size
ROLES_WIDTH = 0.8  # of a bar: the lines of roles stand side by side on it
BAR_WIDTH = 0.8  # of intervals, thinner than lines
TICKS = (1, 2, 5)  # times powers of ten, on logarithmic axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Costs in nats and relative errors measured before quantization, by sublayer."""

    nats: Mapping[str, float] = field(default_factory=dict)
    rel_err: Mapping[str, float] = field(default_factory=dict)


def render_plot(
    layers: Sequence[SublayerReport], kl: float | None, predicted_kl: float | None
) -> str:
    """Plot bits and errors by sublayer, and the costs of errors if they are known."""
    title = f"KL divergence {words.divergence(kl)} nats"
    if predicted_kl is not None:
        title += f", estimated {words.divergence(predicted_kl)}"
    return render_errors(layers, Measured(), title)


def render_errors(layers: Sequence[SublayerReport], measured: Measured, title: str = "") -> str:
    """Plot the same with the values measured before quantization, which are listed by block."""
    layers = by_block(layers)
    is_priced = total_nats(matrices_of(layers)) is not None
    names = [layer.name for layer in layers]
    with _style():
        figure = Figure(figsize=(10, 7.2 if is_priced else 4.2), layout="constrained")
        panels = figure.subplots(1 + is_priced, squeeze=False, sharex=True)[:, 0]
        _draw_bits(panels[0], layers, [measured.rel_err.get(name) for name in names])
        if is_priced:
            _draw_costs(panels[1], layers, [measured.nats.get(name) for name in names])
        named = range(0, len(names), 1 + (len(names) - 1) // MOST_NAMES)
        labels = [words.short(names[index]) for index in named]
        panels[-1].set_xticks(named, labels, rotation=90, fontsize=LABEL_SIZE)
        panels[-1].set_xlim(-0.6, len(layers) - 0.4)
        panels[0].set_title(title)
        return _as_svg(figure, "Bits and errors by sublayer")


def _draw_bits(
    axes: Axes, layers: Sequence[SublayerReport], measured: Sequence[float | None]
) -> None:
    """Draw bits per weight as bars, and relative errors as a line.

    A bar of experts has a line for each role, from the least bits of its matrices to the most, and
    a point at their mean.
    """
    axes.bar(range(len(layers)), [layer.bpw or 0.0 for layer in layers], color=BITS_COLOR)
    axes.set_ylabel("bits per weight")
    _draw_ranges(axes, layers)
    errors = axes.twinx()
    known = [float("nan") if layer.rel_err is None else layer.rel_err for layer in layers]
    errors.plot(known, "o-", color=ERROR_COLOR, markersize=3)
    errors.set_ylabel("relative error", color=ERROR_COLOR)
    if _mark(errors, measured):
        errors.legend(loc="upper right", fontsize=LABEL_SIZE, frameon=False)
    errors.set_ylim(bottom=0)


def _draw_ranges(axes: Axes, layers: Sequence[SublayerReport]) -> None:
    """Draw the bits per weight of the roles of experts."""
    ranges: dict[str, list[tuple[float, list[float]]]] = {}
    for index, layer in enumerate(layers):
        roles = by_role(layer.matrices)
        for place, (role, matrices) in enumerate(roles.items()):
            bits = [matrix.bpw for matrix in matrices if matrix.bpw is not None]
            if len(bits) > 1:
                shift = ROLES_WIDTH * ((place + 0.5) / len(roles) - 0.5)
                ranges.setdefault(role, []).append((index + shift, bits))
    colors = _role_colors(matrices_of(layers))
    for role, drawn in ranges.items():
        color = colors[role]
        at = [place for place, _ in drawn]
        least, most = ([end(bits) for _, bits in drawn] for end in (min, max))
        axes.vlines(at, least, most, color=color, linewidth=BAR_WIDTH, label=role)
        axes.plot(at, [sum(bits) / len(bits) for _, bits in drawn], ".", color=color, markersize=2)
    if ranges:
        axes.legend(ncols=4, loc="lower left", fontsize=LABEL_SIZE)


def _mark(axes: Axes, measured: Sequence[float | None]) -> bool:
    """Mark the values measured before; return whether there are any."""
    known = [(index, value) for index, value in enumerate(measured) if value is not None]
    places, values = [index for index, _ in known], [value for _, value in known]
    if known:
        axes.plot(places, values, "_", color=MARKED_COLOR, markersize=9, label="measured before")
    return bool(known)


def _draw_costs(
    axes: Axes, layers: Sequence[SublayerReport], measured: Sequence[float | None]
) -> None:
    """Draw estimated costs as bars, stacked by matrix, or by role of experts."""
    heights: dict[str, list[float]] = {}
    for place, layer in enumerate(layers):
        for cost in layer.matrices:
            column = heights.setdefault(role_of(cost.name), [0.0] * len(layers))
            column[place] += cost.nats or 0.0
    filled = [0.0] * len(layers)
    colors = _role_colors(matrices_of(layers))
    for name, column in heights.items():
        drawn = [place for place, height in enumerate(column) if height]
        axes.bar(
            drawn,
            [column[place] for place in drawn],
            bottom=[filled[place] for place in drawn],
            color=colors[name],
            label=name,
        )
        filled = [below + height for below, height in zip(filled, column, strict=True)]
    axes.set_ylabel("estimated cost (nats)")
    _mark(axes, measured)
    columns = 7 if max(map(len, heights), default=0) <= SHORT_NAME else 4
    room = 1 + LEGEND_ROOM * -(-len(heights) // columns)
    axes.set_ylim(0, room * max([*filled, *(m or 0.0 for m in measured)]) or None)
    axes.legend(ncols=columns, loc="upper center", fontsize=LABEL_SIZE, frameon=False)


def _role_colors(costs: Sequence[MatrixReport]) -> dict[str, str]:
    """Return the colour of each role, in the order of the model."""
    roles = dict.fromkeys(role_of(cost.name) for cost in costs)
    colors = (*COLORS, *(PLAIN_COLOR for _ in roles))
    return dict(zip(roles, colors, strict=False))


def render_tokens(layers: Sequence[LayerExperts]) -> str:
    """Plot the tokens of experts by layer as a heat map; experts that no token chose are red."""
    widest = max(len(layer.tokens) for layer in layers)
    grid = np.full((len(layers), widest), np.nan)
    for row, layer in zip(grid, layers, strict=True):
        row[: len(layer.tokens)] = layer.tokens
    palette = colormaps["Blues"].with_extremes(under=ERROR_COLOR, bad="white")
    most = max(2.0, float(np.nanmax(grid)))
    least = float(np.min(grid, where=grid > 0, initial=most))
    with _style():
        figure = Figure(figsize=(10, 1.8 + min(6.0, 0.16 * len(layers))), layout="constrained")
        axes = figure.subplots()
        # a logarithm of zero is not drawn, so what lies below the scale stands for it
        lowest = min(least, most / 2)
        shades = LogNorm(vmin=lowest, vmax=most)
        drawn = np.where(grid == 0, lowest / 2, grid)
        image = axes.imshow(drawn, norm=shades, cmap=palette, aspect="auto", interpolation="none")
        named = range(0, len(layers), 1 + (len(layers) - 1) // MOST_LAYERS)
        labels = [words.short(layers[index].name).partition(".")[0] for index in named]
        axes.set_yticks(named, labels, fontsize=LABEL_SIZE)
        axes.set_ylabel("layer")
        axes.set_xlabel("expert")
        scale = figure.colorbar(image, ax=axes, label="tokens").ax.yaxis
        scale.set_major_locator(LogLocator(subs=TICKS))
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        scale.set_minor_formatter(NullFormatter())
        return _as_svg(figure, "Tokens of experts by layer")


def render_comparison(models: Sequence[Compared]) -> str:
    """Plot KL divergence against bits per weight and against size; one point per model.

    Bars are 95 % intervals, where they are known.

    Models without a positive divergence are left out, because its axis is logarithmic. Models that
    are not EXL2 have no bits per weight and appear in the second panel only.
    """
    with _style():
        figure = Figure(figsize=(10.5, 5), layout="constrained")
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
        return _as_svg(figure, "KL divergence by bits per weight and by size")


def _draw_series(axes: Axes, points: Sequence[Point], style: Json, place: Place) -> None:
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
    axes.legend(fontsize=LABEL_SIZE, frameon=False)


def _style() -> AbstractContextManager[None]:
    return rc_context({"svg.hashsalt": "exl2flow", "svg.fonttype": "none", "font.size": LABEL_SIZE})


def _as_svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG document with a name for those who do not see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    before, _, rest = buffer.getvalue().partition("<svg ")
    attributes, _, content = rest.partition(">")
    begin = f'<svg role="img" aria-label="{name}" {attributes}>'
    return f"{before}{begin}\n <title>{name}</title>{content}"
