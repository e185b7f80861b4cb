"""Tables and pages of runs: what they show, and the columns that all rows share."""

from pathlib import Path
from typing import Any

import pytest

from exl2flow.inference.costs import matrix_costs
from exl2flow.inference.evaluate import Score
from exl2flow.tasks.compare import comparison_page
from exl2flow.tasks.quantize import matrix_rows, sublayer_rows


def report(name: str, *projections: str, nats: float | None = 0.25) -> dict[str, Any]:
    item = {"params": "1:3b_64g s4", "bpw": 3.25, "nats": nats, "rel_err": 0.5}
    return {
        "name": name,
        "bpw": 3.5,
        "rel_err": 0.125,
        "projections": dict.fromkeys(projections, item),
    }


REPORTS = [report("model.layers.0.mlp", "up_proj", "down_proj"), report("lm_head", "lm_head")]


def score(folder: Path, kl: float | None) -> Score:
    return Score(
        model=str(folder),
        perplexity=10.0,
        reference_perplexity=None if kl is None else 9.0,
        kl_divergence=kl,
        kl_median=kl,
        kl_p99=kl,
        top1_agreement=None if kl is None else 0.5,
        tokens=100,
        bytes=1000,
    )


def test_sublayers_show_the_sum_of_their_matrices() -> None:
    first, head = sublayer_rows(REPORTS)

    assert first == {
        "sublayer": "model.layers.0.mlp",
        "bits per weight": 3.5,
        "estimated nats": 0.5,
        "relative error": 0.125,
    }
    assert list(head) == list(first)


def test_matrices_show_parameters_cost_and_share() -> None:
    rows = matrix_rows(matrix_costs(REPORTS))

    assert [row["matrix"] for row in rows] == [
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
        "lm_head",
    ]
    assert rows[0] == {
        "matrix": "model.layers.0.mlp.up_proj",
        "parameters": "1:3b_64g s4",
        "bits per weight": 3.25,
        "estimated nats": 0.25,
        "share of the estimate": "33.3 %",
        "relative error": 0.5,
    }


def test_unknown_costs_leave_a_dash() -> None:
    layers = [report("lm_head", "lm_head", nats=None)]

    assert sublayer_rows(layers)[0]["estimated nats"] == "–"
    assert matrix_rows(matrix_costs(layers))[0]["share of the estimate"] == "–"


@pytest.mark.parametrize(("kl", "is_plotted"), [(0.25, True), (None, False)])
def test_page_of_a_comparison_has_a_row_per_model_and_a_plot_of_divergences(
    tmp_path: Path, kl: float | None, is_plotted: bool
) -> None:
    folders = [tmp_path / name for name in ("a", "b")]

    page = comparison_page([score(folder, kl) for folder in folders], ["One\nmorning", ""])

    header, _, *rows = page.splitlines()
    assert all(f"| {f} |" in row for f, row in zip(folders, rows, strict=False))
    assert rows[0].count("|") == header.count("|")
    assert ("data:image/svg+xml;base64," in page) == is_plotted
    assert page.count("## ") == 1
    assert "> One\n> morning" in page
