"""Plots: what is on them, and that they are the same every time."""

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from exl2flow.core.reports import Intervals, Score, SublayerReport, sublayer_reports
from exl2flow.inference.report.comparison import Compared
from exl2flow.inference.report.plots import (
    BITS_COLOR,
    Measured,
    render_comparison,
    render_errors,
    render_plot,
)

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("model.layers.0.self_attn", "model.layers.0.mlp", "lm_head")


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def bars(svg: str, color: str) -> int:
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    return sum(color in path.get("style", "") for path in paths)


def reports(nats: float | None) -> tuple[SublayerReport, ...]:
    """Reports of a model with one layer; each sublayer has one matrix."""
    layers = [
        {
            "name": name,
            "bpw": 3.0 + i / 4,
            "rel_err": 0.05 * (i + 1),
            "projections": {name.rpartition(".")[2]: {"nats": nats, "rel_err": 0.1}},
        }
        for i, name in enumerate(NAMES)
    ]
    return sublayer_reports(layers)


def model(label: str, **values: Any) -> Compared:
    defaults: dict[str, Any] = {"series": "standard", "bpw": 3.0, "bytes": 10**6, "kl": 0.1}
    return Compared(label=label, predicted_kl=None, **{**defaults, **values})


def test_plot_has_a_bar_and_a_name_per_sublayer() -> None:
    svg = render_plot(reports(None), 0.04321, None)

    found = texts(svg)
    assert {"0.self_attn", "0.mlp", "lm_head", "bits per weight", "relative error"} <= set(found)
    assert "estimated cost (nats)" not in found
    assert any("0.0432" in text for text in found)
    assert bars(svg, BITS_COLOR) == 3


def test_known_costs_get_a_panel_of_their_own() -> None:
    svg = render_plot(reports(0.01), 0.04321, 0.03)

    found = texts(svg)
    assert {"estimated cost (nats)", "self_attn", "mlp"} <= set(found)
    assert any("estimated 0.0300" in text for text in found)
    assert bars(svg, BITS_COLOR) == 3


def test_values_measured_before_quantization_are_marked() -> None:
    name = NAMES[0]
    priced = render_errors(reports(0.01), Measured(nats={name: 0.02}))
    by_error = render_errors(reports(None), Measured(rel_err={name: 0.02}))
    plain = render_errors(reports(0.01), Measured())

    assert [texts(svg).count("measured before") for svg in (priced, by_error, plain)] == [1, 1, 0]


@pytest.mark.parametrize("nats", [None, 0.01])
def test_plot_is_the_same_every_time(nats: float | None) -> None:
    first, second = (render_plot(reports(nats), 0.04321, None) for _ in range(2))

    assert first == second


def plain(layers: int) -> list[SublayerReport]:
    names = [f"model.layers.{layer}.mlp" for layer in range(layers)]
    return [SublayerReport(name=name, bpw=4.0, rel_err=0.1) for name in names]


def test_plot_of_many_layers_is_drawn() -> None:
    assert render_plot(plain(60), 0.04321, None).count("59.mlp") == 1


def test_names_of_very_many_layers_do_not_overlap() -> None:
    names = [t for t in texts(render_plot(plain(160), 0.04321, None)) if "mlp" in t]

    assert names == [f"{i}.mlp" for i in range(0, 160, 3)]


def test_every_model_is_labelled_in_both_panels() -> None:
    models = [model("three", bpw=3.0), model("four", bpw=4.0, bytes=2 * 10**6, kl=0.02)]

    found = texts(render_comparison(models))

    assert [found.count(label) for label in ("three", "four")] == [2, 2]
    assert found.count("standard") == 2  # a legend each


def test_series_are_joined_by_lines_and_others_are_not() -> None:
    joined = [model("a", bpw=3.0), model("b", bpw=4.0, kl=0.05)]
    single = [model("a", series=None), model("b", series=None, bpw=4.0, kl=0.05)]

    assert lines(render_comparison(joined)) == 2 * 2  # in each panel, and in its legend
    assert lines(render_comparison(single)) == 0


def lines(svg: str) -> int:
    """Count what is drawn with the width of a line of data."""
    return svg.count("stroke-width: 1.5")


def test_a_model_without_bits_per_weight_is_on_the_panel_of_bytes_only() -> None:
    found = texts(render_comparison([model("exl2"), model("plain", series=None, bpw=None)]))

    assert [found.count(label) for label in ("exl2", "plain")] == [2, 1]


@pytest.mark.parametrize("kl", [0.0, None])
def test_models_without_a_positive_divergence_are_left_out(kl: float | None) -> None:
    found = texts(render_comparison([model("source", kl=kl, bpw=None)]))

    assert "source" not in found
    assert found.count("nothing to show") == 2


def test_comparison_is_the_same_every_time() -> None:
    models = [model("a"), model("b", series=None, kl=0.3)]

    assert render_comparison(models) == render_comparison(models)


def test_known_intervals_are_bars_in_both_panels() -> None:
    sure = replace(SCORE, intervals=Intervals.of({"kl_divergence": [0.08, 0.13]}))
    models = [model("a", score=sure), model("b", bpw=4.0, kl=0.05)]

    plain = [replace(found, score=None) for found in models]
    bars = [render_comparison(found).count("LineCollection") for found in (models, plain)]
    assert bars == [2, 0]


SCORE = Score(
    model="a",
    perplexity=9.5,
    reference_perplexity=9.0,
    kl_divergence=0.1,
    kl_median=0.1,
    kl_p99=0.2,
    top1_agreement=0.75,
    tokens=64,
    bytes=1000,
)
