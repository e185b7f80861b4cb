"""Tables and pages of runs: what they show, and the columns that all rows share."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from expert_reports import group_report
from tiny import make_tiny

from exl2flow.core.reports import AllocationReport, Score, SublayerReport
from exl2flow.inference.report.plots import Measured
from exl2flow.model import QuantParams, resolve
from exl2flow.pipeline.hub.publish import Published
from exl2flow.tasks import allocate
from exl2flow.tasks.allocate import matrix_rows
from exl2flow.tasks.compare import comparison_page
from exl2flow.tasks.hub_tasks import branch_links, publication_page
from exl2flow.tasks.quantize import errors_page, measured_of, sublayer_rows


def report(name: str, *projections: str, nats: float | None = 0.25) -> SublayerReport:
    item = {"params": "1:3b_64g s4", "bpw": 3.25, "nats": nats, "rel_err": 0.5}
    content = {"bpw": 3.5, "rel_err": 0.125, "projections": dict.fromkeys(projections, item)}
    return SublayerReport.from_json({"name": name, **content})


def allocation(choice: dict[str, dict[str, float]]) -> AllocationReport:
    return AllocationReport.from_json({"objective": "nats", "choice": choice})


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


MEASURED = Measured(nats={"model.layers.0.mlp": 0.75})


def test_sublayers_show_the_sum_of_their_matrices_and_what_was_measured() -> None:
    first, head = sublayer_rows(REPORTS, MEASURED)

    assert first == {
        "sublayer": "0.mlp",
        "bits per weight": "3.500",
        "cost (nats)": "0.50",
        "relative error": "0.1250",
        "measured cost": "0.75",
    }
    assert list(head) == list(first)
    assert head["measured cost"] == "–"


def test_sublayers_measured_by_their_errors_show_these() -> None:
    layers = [report("model.layers.0.mlp", "up_proj", nats=None)]
    measured = Measured(rel_err={"model.layers.0.mlp": 0.25})

    assert sublayer_rows(layers, measured) == [
        {
            "sublayer": "0.mlp",
            "bits per weight": "3.500",
            "cost (nats)": "–",
            "relative error": "0.1250",
            "measured error": "0.2500",
        }
    ]


def test_page_of_errors_has_a_plot_and_a_row_per_sublayer() -> None:
    page = errors_page(REPORTS, MEASURED)

    assert page.startswith("![bits and errors by sublayer](data:image/svg+xml;base64,")
    assert "| 0.mlp | 3.500 | 0.50 | 0.1250 | 0.75 |" in page.splitlines()
    assert "| lm_head |" in page


def test_measured_costs_of_a_sublayer_are_added_up_where_all_are_known(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path / "tiny"))
    attention, mlp = spec.sublayers[:2]
    chosen: dict[str, dict[str, float]] = {
        p.key: {"nats": 0.5, "accuracy": 0.9} for p in (*attention.projections, mlp.projections[0])
    }

    assert measured_of(spec, allocation(chosen)) == Measured(nats={attention.name: 2.0})
    assert measured_of(spec, allocation({mlp.name: {"accuracy": 0.75}})) == Measured(
        rel_err={mlp.name: 0.25}
    )


def test_groups_of_experts_are_one_sublayer_with_all_measured_costs(tmp_path: Path) -> None:
    spec = replace(resolve(make_checkpoint("qwen3-moe", tmp_path / "moe")), group_weights=1)
    groups = [s for s in spec.sublayers if s.block == "model.layers.0.mlp.experts"]
    chosen = {p.key: {"nats": 0.5} for group in groups for p in group.projections}
    reports = [group_report(0, range(e, e + 1), [500]) for e in range(len(groups))]

    (row,) = sublayer_rows(reports, measured_of(spec, allocation(chosen)))

    assert len(groups) > 1
    assert row["sublayer"] == "0.mlp.experts"
    assert float(row["measured cost"]) == pytest.approx(0.5 * len(chosen))


def test_very_many_matrices_share_rows_by_layer_and_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve(make_checkpoint("qwen3-moe", tmp_path / "moe"))
    params = QuantParams(bit_widths=(4,), proportions=(1.0,), group_sizes=(32,))
    choice = {p.key: params for p in spec.projections}
    costs = {p.key: {"nats": 0.25} for p in spec.projections}
    allotted = allocation(costs)

    assert len(matrix_rows(spec.projections, choice, allotted)) == len(spec.projections)
    monkeypatch.setattr(allocate, "MOST_ROWS", 20)
    rows = {row["matrix"]: row for row in matrix_rows(spec.projections, choice, allotted)}

    assert len(rows) == 2 * (4 + 3)
    experts = spec.experts_of(0)
    shared = rows["0.mlp.experts.*.up_proj"]
    assert shared["parameters"] == f"{experts} matrices"
    assert float(shared["cost (nats)"]) == 0.25 * experts


@pytest.mark.parametrize(("kl", "is_plotted"), [(0.25, True), (None, False)])
def test_page_of_a_comparison_has_a_row_per_model_and_a_plot_of_divergences(
    tmp_path: Path, kl: float | None, is_plotted: bool
) -> None:
    folders = [tmp_path / name for name in ("3.0bpw", "4.0bpw")]
    links = {"4.0bpw": "http://hub/org/tiny/tree/4.0bpw"}

    page = comparison_page(
        [score(folder, kl) for folder in folders], ["One\nmorning", ""], links=links
    )

    header, _, *rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows[0].startswith("| 3.0bpw |")
    assert rows[1].startswith("| [4.0bpw](http://hub/org/tiny/tree/4.0bpw) |")
    assert rows[0].count("|") == header.count("|")
    assert ("data:image/svg+xml;base64," in page) == is_plotted
    assert page.count("## Sample of ") == 1
    assert "> One\n> morning" in page
    assert f"- `{folders[0]}`" in page


def test_page_of_a_publication_links_repository_branches_and_commits() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    url = "http://hub/org/tiny-exl2"
    published = Published(
        url=url, branches={"4.0bpw": commit}, sent=("a", "b"), private=True, notes=("gated",)
    )

    page = publication_page("org/tiny-exl2", published)

    assert page.startswith(f"[org/tiny-exl2]({url}) is private; this run sent 2 files.")
    assert f"| [4.0bpw]({url}/tree/4.0bpw) | [`01234567`]({url}/commit/{commit}) |" in page
    assert "**Published in spite of:** gated" in page
    assert branch_links(published) == {"4.0bpw": f"{url}/tree/4.0bpw"}
