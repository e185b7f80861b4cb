"""The report for people: what it says, and that it is the same every time."""

from typing import Any
from xml.etree import ElementTree

import pytest

from exl2flow.inference.report import render_markdown, render_plot

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of a model with one layer."""
    names = ("model.layers.0.self_attn", "model.layers.0.mlp", "lm_head")
    return {
        "model": "/models/tiny-exl2",
        "source": "/models/tiny",
        "bpw": 3.5,
        "source_bytes": 1234567,
        "score": {
            "perplexity": 12.3456,
            "reference_perplexity": 11.1111,
            "kl_divergence": 0.04321,
            "kl_median": 0.01234,
            "kl_p99": 0.56789,
            "top1_agreement": 0.9012,
            "tokens": 16376,
            "bytes": 345678,
        },
        "calibration": {"perplexity": 22.5, "reference_perplexity": 21.25},
        "layers": [
            {"name": name, "bpw": 3.0 + i / 4, "rel_err": 0.05 * (i + 1)}
            for i, name in enumerate(names)
        ],
        "sample": "One morning\nit rained.",
        "warnings": [],
        "failures": [],
    }


def test_markdown_shows_every_figure(report: dict[str, Any]) -> None:
    text = render_markdown(report)

    for line in (
        "# tiny at 3.5 bits per weight",
        "**Passed.**",
        "| perplexity | 11.1111 | 12.3456 |",
        "| perplexity, calibration text | 21.2500 | 22.5000 |",
        "| KL divergence, mean (nats) | | 0.04321 |",
        "| KL divergence, median | | 0.01234 |",
        "| KL divergence, 99 % | | 0.56789 |",
        "| top-1 agreement | | 0.9012 |",
        "| bytes of weights | 1,234,567 | 345,678 |",
        "Measured on 16,376 tokens. The model lies in `/models/tiny-exl2`.",
        "| model.layers.0.self_attn | 3.000 | 0.05000 |",
        "| lm_head | 3.500 | 0.15000 |",
        "> One morning",
        "> it rained.",
    ):
        assert line in text.splitlines(), line


@pytest.mark.parametrize(
    ("warnings", "failures", "line"),
    [
        (["a", "b"], [], "**Passed with warnings:** a; b"),
        (["a"], ["c"], "**Failed:** c"),
    ],
)
def test_verdict_stands_first(
    warnings: list[str], failures: list[str], line: str, report: dict[str, Any]
) -> None:
    text = render_markdown({**report, "warnings": warnings, "failures": failures})

    assert text.splitlines()[2] == line


def test_missing_parts_leave_no_traces(report: dict[str, Any]) -> None:
    text = render_markdown({**report, "calibration": None, "sample": ""})

    assert "calibration" not in text
    assert "Sample" not in text


def test_plot_is_svg_with_a_bar_and_a_name_per_sublayer(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(render_plot(report))

    assert root.tag == f"{SVG}svg"
    texts = ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]
    assert {"0.self_attn", "0.mlp", "lm_head", "bits per weight", "relative error"} <= set(texts)
    assert any("0.0432" in text for text in texts)
    bars = [element for element in root.iter(f"{SVG}path") if "#9db8d2" in element.get("style", "")]
    assert len(bars) == 3


def test_plot_is_the_same_every_time(report: dict[str, Any]) -> None:
    assert render_plot(report) == render_plot(report)


def test_plot_of_many_layers_is_drawn(report: dict[str, Any]) -> None:
    layers = [{"name": f"model.layers.{i}.mlp", "bpw": 4.0, "rel_err": 0.1} for i in range(60)]

    assert render_plot({**report, "layers": layers}).count("59.mlp") == 1
