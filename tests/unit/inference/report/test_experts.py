"""What people see of experts: sums by layer and role, and how well a text covered them."""

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from expert_reports import group_report, item, model_reports, report_of
from zeros import zeros

from exl2flow.cli.output.results import layer_table, print_report, show_contents
from exl2flow.core.reports import ExpertsReport, Report, matrices_of, sublayer_reports
from exl2flow.core.store.files import write_tensors
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.blocks import by_block, by_role
from exl2flow.inference.report.experts import coverage_in_words, expert_rows, never_routed
from exl2flow.inference.report.frames import allocation_frame, role_frame
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.inference.report.markdown import render_markdown
from exl2flow.inference.report.page import write_up
from exl2flow.inference.report.plots import render_plot, render_tokens
from exl2flow.quant.quantize.routing import experts_summary


def small_report(layers: int = 2, experts: int = 6, group: int = 4) -> Report:
    return Report.from_json(report_of(model_reports(layers, experts=experts, group=group)))


def plot_of(report: Report) -> str:
    return render_plot(report.layers, report.score.kl_divergence, report.predicted_kl)


@pytest.fixture(scope="module")
def large() -> Report:
    """A report with 18,432 matrices of experts."""
    return small_report(layers=48, experts=128, group=26)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two layers with six experts each in groups of four, and its records."""
    report = report_of(model_reports(layers=2, experts=6, group=4))
    tensors: dict[str, torch.Tensor] = {}
    for cost in matrices_of(sublayer_reports(report["layers"])):
        tensors |= zeros().to_tensors(cost.key)
    path = tmp_path / "moe"
    path.mkdir()
    write_tensors(path / "model.safetensors", tensors)
    names = ("source", "predicted_kl", "experts", "layers")
    record = {name: report[name] for name in names} | {"fingerprint": "f"}
    (path / RECORD_FILE).write_text(json.dumps(record))
    score = {"fingerprint": "f", "score": report["score"]}
    (path / SCORE_FILE).write_text(json.dumps(score))
    return path


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    found = root.iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()).strip() for element in found]


def test_groups_of_a_layer_are_one_block_with_all_their_matrices() -> None:
    layers = model_reports(layers=1, experts=6, group=4)

    attention, experts, head = by_block(layers)

    first, second = layers[1:3]
    assert (attention, head) == (layers[0], layers[3])
    assert experts.name == "model.layers.0.mlp.experts"
    assert experts.bpw == pytest.approx((4 * (first.bpw or 0) + 2 * (second.bpw or 0)) / 6)
    assert experts.rel_err == pytest.approx(0.03 * 2**0.5)
    assert experts.matrices == first.matrices + second.matrices


def test_roles_are_names_without_the_number_of_the_expert() -> None:
    (block,) = by_block([group_report(0, range(3), [1, 2, 3])])

    roles = by_role(block.matrices)

    assert list(roles) == [f"experts.{role}_proj" for role in ("gate", "up", "down")]
    assert [cost.key for cost in roles["experts.up_proj"]] == [
        f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in range(3)
    ]


def test_tokens_are_counted_by_layer_and_experts_without_any_are_named() -> None:
    layers = [group_report(layer, range(4), [0, 0, 1500, 90]) for layer in (3, 7, 9, 11, 12)]
    found = experts_summary(layers).layers

    assert expert_rows(found)[0] == {
        "layer": "3.mlp.experts",
        "experts": "4",
        "fewest tokens": "0",
        "median": "45",
        "most": "1,500",
        "topped up": "3",
        "never routed": "2",
        "changed routes": "2.00 %",
    }
    named = never_routed(found)
    assert named.startswith("3.mlp.experts.0, 3.mlp.experts.1, 7.mlp.experts.0, ")
    assert named.endswith("11.mlp.experts.1 and 2 more")
    assert never_routed(found[:4]).endswith("11.mlp.experts.1")
    assert coverage_in_words(found) == (
        "Each of the 20 experts in 5 layers was chosen by 0 to 1,500 calibration tokens, half of "
        "them by at least 90; 15 had too few and were topped up with tokens that nearly chose "
        "them; 10 were never chosen"
    )


@pytest.mark.parametrize(
    "summary",
    [
        None,
        [],
        {"layers": 3},
        {"layers": [3, {"tokens": []}, {"tokens": "ab", "topped_up": 1, "median": 1}]},
        {"layers": [{"tokens": [1, -1], "topped_up": 0, "median": 1}]},
        {"layers": [{"tokens": [1, None], "topped_up": 0, "median": 1}]},
    ],
)
def test_summaries_that_we_did_not_write_are_left_out(summary: object) -> None:
    assert ExpertsReport.from_json(summary).layers == ()


def test_the_report_has_a_row_per_layer_and_a_column_per_role() -> None:
    lines = render_markdown(small_report()).splitlines()

    (header,) = [line for line in lines if "experts.gate_proj" in line and "sublayer" in line]
    assert [cell.strip() for cell in header.strip("|").split("|")][4:] == [
        "experts.gate_proj",
        "experts.up_proj",
        "experts.down_proj",
    ]
    assert "## Experts" in lines
    assert "| 1.mlp.experts | 6 | 201 | 226 | 251 | 0 | 0 | 2.00 % |" in lines
    assert sum(line.startswith("| 0.mlp.experts |") for line in lines) == 2
    assert not any("experts.0-3" in line for line in lines)


def test_a_report_of_18432_matrices_stays_short(large: Report) -> None:
    costs = matrices_of(large.layers)
    assert sum(".experts." in cost.key for cost in costs) == 18_432

    assert len(render_markdown(large)) < 50_000
    assert len(plot_of(large)) < 400_000
    assert len(render_tokens(large.experts.layers)) < 100_000


def test_plots_draw_roles_of_experts_and_name_layers() -> None:
    svg = plot_of(small_report())

    found = texts(svg)
    assert {"0.mlp.experts", "1.mlp.experts", "experts.up_proj"} <= set(found)
    assert not any("0-3" in text or "experts.0" in text for text in found)


def test_the_heat_map_marks_experts_that_no_token_chose() -> None:
    def svg(tokens: list[int]) -> str:
        return render_tokens(experts_summary([group_report(0, range(3), tokens)]).layers)

    marked = svg([5, 0, 900])

    assert {"expert", "layer", "tokens"} <= set(texts(marked))
    assert marked == svg([5, 0, 900])
    assert marked != svg([5, 5, 900])


def test_inspect_sums_the_experts_of_a_layer_and_knows_every_matrix(folder: Path) -> None:
    contents = inspect_model(folder)

    assert [part.name for part in contents.parts] == [
        *(f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn", "mlp.experts")),
        "lm_head",
    ]
    experts = contents.parts[1]
    assert experts.rel_err == pytest.approx(0.03 * 2**0.5)
    matrices = {matrix.key: matrix for matrix in experts.matrices}
    report = json.loads((folder / RECORD_FILE).read_text())["layers"][2]["projections"]
    known = report["experts.5.up_proj"]
    found = matrices["model.layers.0.mlp.experts.5.up_proj"]
    assert (found.nats, found.rel_err) == (known["nats"], known["rel_err"])
    assert len(contents.to_json()["layers"][1]["matrices"]) == 18  # type: ignore[index]


def test_a_shared_expert_beside_the_others_belongs_to_its_layers_experts(folder: Path) -> None:
    """Granite calls it `shared_mlp`, which only the record knows to be one of the experts."""
    path, record = folder / "model.safetensors", json.loads((folder / RECORD_FILE).read_text())
    key = "model.layers.0.shared_mlp.up_proj"
    source = inspect_model(folder)
    tensors = {}
    for matrix in source.matrices:
        tensors |= zeros().to_tensors(matrix.key)
    write_tensors(path, tensors | zeros().to_tensors(key))
    entry = item(random.Random(0), key)
    record["layers"][2]["projections"]["shared.up_proj"] = entry
    (folder / RECORD_FILE).write_text(json.dumps(record))

    experts = inspect_model(folder).parts[1]

    assert experts.name == "model.layers.0.mlp.experts"
    (shared,) = [matrix for matrix in experts.matrices if matrix.key == key]
    assert shared.nats == entry["nats"]


def test_the_terminal_lists_layers_and_says_how_experts_were_covered(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_contents(inspect_model(folder), matrices=False)

    shown = " ".join(capsys.readouterr().out.split())
    assert "0.mlp.experts " in shown
    assert "Each of the 12 experts in 2 layers was chosen by 200 to 251" in shown
    assert "2.00 % of the choices of experts" in shown

    report = small_report()
    assert layer_table(report.layers).row_count == 2  # 5 cells
    print_report(report, "/r")
    assert "Each of the 12 experts in 2 layers" in capsys.readouterr().out


def test_the_page_shows_tokens_by_layer_and_expert(folder: Path) -> None:
    page = write_up(folder)

    assert "<h2>Tokens of experts</h2>" in page
    assert "Each of the 12 experts in 2 layers" in page
    assert "<th>1.mlp.experts</th><td>6</td><td>201</td>" in page
    assert "mlp.experts.0-3" not in page


def test_frames_have_all_matrices_or_a_row_per_role(folder: Path) -> None:
    matrices, roles = allocation_frame(folder), role_frame(folder)

    assert len(matrices) == 2 * (4 + 18) + 1
    assert len(roles) == 2 * (4 + 3) + 1
    gates = roles[roles["role"] == "mlp.experts.gate_proj"].iloc[0]
    own = matrices[matrices["matrix"].str.match(r".*layers\.0.*experts.*gate_proj")]
    assert gates["matrices"] == len(own) == 6
    assert gates["cost_nats"] == pytest.approx(own["cost_nats"].sum())
    assert gates["relative_error_most"] == own["relative_error"].max()
    assert gates["relative_error"] == pytest.approx(own["relative_error"].mean())
