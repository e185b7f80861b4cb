"""The report for people: what it says, and what it leaves out when nothing is known."""

from typing import Any

import pytest

from exl2flow.core.reports import Report
from exl2flow.inference.report import markdown


def render_markdown(content: dict[str, Any]) -> str:
    return markdown.render_markdown(Report.from_json(content))


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
        "calibration": {
            "perplexity": 22.5,
            "reference_perplexity": 21.25,
            "kl_divergence": 0.03333,
            "tokens": 8188,
            "bytes": 345678,
        },
        "layers": [
            {"name": name, "bpw": 3.0 + i / 4, "rel_err": 0.05 * (i + 1)}
            for i, name in enumerate(names)
        ],
        "sample": "One morning\nit rained.",
        "warnings": [],
        "failures": [],
    }


def test_parts_that_are_not_quantized_are_named(report: dict[str, Any]) -> None:
    apart = {"parts": "visual", "tensors": 18, "bytes": 147_584}

    text = render_markdown(report | {"not_quantized": apart})

    assert "Not quantized, as in the source: visual (18 tensors, 147.58 kB)." in text
    assert "Not quantized" not in render_markdown(report)


def test_markdown_shows_every_figure(report: dict[str, Any]) -> None:
    text = render_markdown(report)

    for line in (
        "# tiny at 3.500 bits per weight",
        "**Passed.**",
        "| perplexity, 16,376 held-out tokens | 11.1111 | 12.3456 |",
        "| perplexity, 8,188 calibration tokens | 21.2500 | 22.5000 |",
        "| KL divergence, mean (nats) | | 0.04321 |",
        "| KL divergence, mean on calibration tokens | | 0.03333 |",
        "| KL divergence, median | | 0.01234 |",
        "| KL divergence, 99th percentile | | 0.56789 |",
        "| top-1 agreement | | 90.12 % |",
        "| weights on disk | 1.23 MB | 345.68 kB |",
        "The model is in `/models/tiny-exl2`.",
        "| 0.self_attn | 3.000 | – | 0.0500 |",
        "| lm_head | 3.500 | – | 0.1500 |",
        "> One morning",
        "> it rained.",
    ):
        assert line in text.splitlines(), line


@pytest.mark.parametrize(
    ("warnings", "failures", "line"),
    [(["a", "b"], [], "**Passed with warnings:** a; b"), (["a"], ["c"], "**Failed:** c")],
)
def test_verdict_stands_first(
    warnings: list[str], failures: list[str], line: str, report: dict[str, Any]
) -> None:
    text = render_markdown({**report, "warnings": warnings, "failures": failures})

    assert text.splitlines()[2] == line


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "no intervals, because the scores of its rows were not recorded"),
        (7, "no intervals, because 7 rows are fewer than 8"),
        (8, "95 % intervals over 8 rows"),
    ],
)
def test_it_says_on_how_many_rows_intervals_rest(
    rows: int | None, said: str, report: dict[str, Any]
) -> None:
    sums = {"tokens": [100] * (rows or 0), "losses": [1.0] * (rows or 0)}
    known = {} if rows is None else {"rows": sums}
    scores = {text: report[text] | known for text in ("score", "calibration")}

    assert f"Certainty: {said}." in render_markdown(report | scores).splitlines()


def test_missing_parts_leave_no_traces(report: dict[str, Any]) -> None:
    text = render_markdown({**report, "calibration": None, "sample": ""})

    for word in ("calibration", "Calibrated", "Sample", "estimated, sum", "Where", "Tuned"):
        assert word not in text


def projection(nats: float | None, bpw: float = 3.25) -> dict[str, Any]:
    return {"params": "1:3b_64g s4", "bpw": bpw, "nats": nats, "rel_err": 0.125}


@pytest.fixture
def priced(report: dict[str, Any]) -> dict[str, Any]:
    """The same model with costs of all matrices: 0.01, 0.02 and so on, the head's 0.06."""
    names = (("q_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"), ("lm_head",))
    costs = iter(range(1, 7))
    layers = [
        {**layer, "projections": {name: projection(next(costs) / 100) for name in members}}
        for layer, members in zip(report["layers"], names, strict=True)
    ]
    return {**report, "layers": layers, "predicted_kl": 0.21}


def test_costs_of_matrices_are_summed_and_the_largest_stand_first(priced: dict[str, Any]) -> None:
    lines = render_markdown(priced).splitlines()

    assert "| KL divergence, estimated, sum over matrices | | 0.21000 |" in lines
    first = next(i for i, line in enumerate(lines) if line.startswith("2 of 6 matrices cause 52 %"))
    assert lines[first + 4] == "| lm_head | 1:3b_64g s4 | 3.250 | 0.060 | 28.6 % | 0.1250 |"
    assert lines[first + 5].startswith("| 0.mlp.down_proj |")


def test_sublayers_have_a_column_per_matrix(priced: dict[str, Any]) -> None:
    lines = render_markdown(priced).splitlines()

    (header,) = (line for line in lines if line.endswith("| gate_proj | up_proj | down_proj |"))
    (row,) = (line for line in lines if line.startswith("| 0.mlp | "))
    assert header.count("|") == row.count("|")
    assert "| 0.12 | 0.1000 | 3.250 · 0.030 · 0.1250 |" in row
    assert "| lm_head | 3.500 | 0.060 | 0.1500 |" in lines


def test_a_cost_that_is_unknown_hides_the_ranking(priced: dict[str, Any]) -> None:
    priced["layers"][1]["projections"]["up_proj"] = projection(None)

    text = render_markdown(priced)

    assert "Where the divergence" not in text
    assert "3.250 · – · 0.1250" in text


def test_rows_of_calibration_and_tuning_are_told(report: dict[str, Any]) -> None:
    rows = {"kinds": {"web": 3, "code": 1}, "notes": ["a dialogue was cut"]}
    tuning = {
        "steps": 40,
        "first_kl": 0.5,
        "best_kl": 0.25,
        "refused": "not taken, because held-out text got worse",
        "texts": {"held-out": {"rows": 4, "first_kl": 0.75, "best_kl": 0.7}},
    }
    told = {
        "calibration_rows": {"dataset": "(chat)", "quantize": rows, "measure": rows},
        "tuning": tuning,
    }

    text = render_markdown({**report, **told})

    assert "Calibrated on 4 rows of `(chat)`: web 3, code 1." in text
    assert "Note: a dialogue was cut." in text
    assert "held-back rows by text: held-out 0.75000 → 0.70000." in text
    assert "A lower divergence was not taken, because held-out text got worse." in text
