"""One converted model, told by every report: the same figures in the same words, also as frames."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conversions import small_config
from rich.console import Console
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.output.results import comparison_table, score_table
from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.store.files import read_json
from exl2flow.inference.report.card import render_card
from exl2flow.inference.report.comparison import compared, known_score
from exl2flow.inference.report.frames import allocation_frame, measurement_frame, score_frame
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.inference.report.page import write_up
from exl2flow.inference.report.publication import Origin, describe
from exl2flow.inference.validate.stage import report_in
from exl2flow.pipeline.local import run_locally
from exl2flow.tasks.compare import comparison_page
from exl2flow.tasks.validate import report_page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    source = make_tiny("llama", root / "tiny")
    config = small_config(source, root / "tiny-3bpw", bpw=3.0, work_root=root / "work")
    run_locally(config)
    return root


@pytest.fixture(scope="module")
def model(converted: Path) -> Path:
    return converted / "tiny-3bpw"


@pytest.fixture(scope="module")
def validation(converted: Path) -> Path:
    """The stage folder of `validate`."""
    (report,) = converted.glob("work/*/validate/*/report.json")
    return report.parent


def printed(table: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]  # StringIO


def terminal_report(model: Path, validation: Path) -> str:
    return printed(score_table(report_in(validation)))


def run_page_report(model: Path, validation: Path) -> str:
    return report_page(validation)


def terminal_comparison(model: Path, validation: Path) -> str:
    score = known_score(model)
    assert score is not None
    return printed(comparison_table(compared([score])))


def run_page_comparison(model: Path, validation: Path) -> str:
    score = known_score(model)
    assert score is not None
    return comparison_page([score], [""])


def html(model: Path, validation: Path) -> str:
    return write_up(model)


def card(model: Path, validation: Path) -> str:
    return render_card("org/tiny-exl2", [describe(model)], Origin())


REPORTS = (terminal_report, run_page_report, terminal_comparison, run_page_comparison, html, card)


@pytest.mark.parametrize("render", REPORTS, ids=lambda render: render.__name__)
def test_every_report_states_the_same_figures(
    render: Callable[[Path, Path], str], model: Path, validation: Path
) -> None:
    score, contents = known_score(model), inspect_model(model)
    assert score is not None
    assert contents.record is not None

    text = render(model, validation)

    figures = {
        "source perplexity": words.perplexity(score.reference_perplexity),
        "perplexity": words.perplexity(score.perplexity),
        "KL divergence": words.divergence(score.kl_divergence),
        "KL p99": words.divergence(score.kl_p99),
        "estimated KL": words.divergence(contents.record.predicted_kl),
        "top-1 agreement": words.percent(score.top1_agreement),
        "size": words.size(sum(path.stat().st_size for path in model.glob("*.safetensors"))),
    }
    if render is not terminal_report:
        figures["bits per weight"] = words.bits(contents.bpw)
    assert {name: figure in text for name, figure in figures.items()} == dict.fromkeys(
        figures, True
    )
    assert not re.search(r"\d [KMG]iB\b", text)


def test_inspect_states_the_figures_of_the_report(model: Path) -> None:
    contents, score = inspect_model(model), known_score(model)
    assert score is not None

    shown = CliRunner().invoke(app, ["inspect", str(model)]).stdout

    for figure in (
        words.bits(contents.bpw),
        words.divergence(score.kl_divergence),
        words.size(contents.file_bytes),
    ):
        assert figure in shown


def test_matrices_are_written_as_csv_and_parquet(model: Path, tmp_path: Path) -> None:
    csv, parquet = tmp_path / "m.csv", tmp_path / "m.parquet"
    arguments = ["inspect", str(model), "--csv", str(csv), "--parquet", str(parquet), "--json"]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0
    stated = [
        m
        for part in ("layers", "others")
        for p in json.loads(result.stdout)[part]
        for m in p["matrices"]
    ]
    for frame in (pd.read_csv(csv), pd.read_parquet(parquet)):
        assert list(frame["matrix"]) == [m["key"] for m in stated]
        assert list(frame["stored_bytes"]) == [m["bits"] // 8 for m in stated]
        assert list(frame["cost_nats"]) == pytest.approx([m["nats"] for m in stated])
        assert list(frame["relative_error"]) == pytest.approx([m["rel_err"] for m in stated])
        assert list(frame["parameters"]) == [m["params"] for m in stated]


def test_a_file_that_cannot_be_written_is_an_error_without_traceback(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    result = CliRunner().invoke(app, ["inspect", str(model), "--csv", str(tmp_path / "file" / "m")])

    assert result.exit_code == 1
    assert "error: cannot write" in result.stderr
    assert result.stdout == ""


def test_an_allocation_adds_up_to_the_bits_of_the_model(model: Path) -> None:
    frame = allocation_frame(model)

    layers = frame[frame["sublayer"] != frame["matrix"]]
    weights = (layers["in_features"] * layers["out_features"]).sum()
    assert 8 * layers["stored_bytes"].sum() / weights == pytest.approx(inspect_model(model).bpw)
    record = inspect_model(model).record
    assert record is not None
    assert frame["cost_nats"].sum() == pytest.approx(record.predicted_kl)


def test_a_measurement_has_a_row_per_candidate(converted: Path, model: Path) -> None:
    (path,) = converted.glob("work/*/measure/*/measurement.json")
    entries = read_json(path)["measurement"]

    frame = measurement_frame(path)

    slots = {slot: found for slot, found in entries.items() if found}
    assert dict(frame.groupby("slot", sort=False).size()) == {k: len(v) for k, v in slots.items()}
    first = slots[frame["slot"][0]][0]
    row = frame.iloc[0]
    assert (row["candidate"], row["stored_bits"], row["cost_nats"]) == (
        0,
        first["total_bits"],
        first["nats"],
    )
    assert row["relative_error"] == pytest.approx(1 - first["accuracy"])
    chosen = allocation_frame(model).set_index("matrix")["parameters"]
    for slot in slots:  # every choice was a candidate
        assert chosen[slot] in set(frame[frame["slot"] == slot]["parameters"])


def test_scores_are_those_of_the_report(model: Path, validation: Path) -> None:
    frame = score_frame([model])

    score = read_json(validation / "report.json")["score"]
    (row,) = frame.to_dict("records")
    assert row["model"] == "tiny-3bpw"
    assert (row["perplexity"], row["kl_divergence_nats"]) == (
        score["perplexity"],
        score["kl_divergence"],
    )
    assert (row["size_bytes"], row["tokens"]) == (score["bytes"], score["tokens"])


def test_the_example_of_the_page_runs(converted: Path, model: Path) -> None:
    (path,) = converted.glob("work/*/measure/*/measurement.json")
    page = (ROOT / "docs" / "concepts" / "validation.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    script = re.sub(r"model-exl2/\d\.0bpw", str(model), script)

    exec(script.replace('"measurement.json"', repr(str(path))))


def test_what_is_no_measurement_and_no_scored_model_is_refused(
    converted: Path, tmp_path: Path
) -> None:
    (tmp_path / "measurement.json").write_text('{"measurement": {"a": [{"accuracy": 1}]}}')

    with pytest.raises(ConfigError, match="cannot be read as a measurement"):
        measurement_frame(tmp_path / "measurement.json")
    with pytest.raises(ConfigError, match="cannot be read as a measurement"):
        measurement_frame(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="has no score"):
        score_frame([converted / "tiny"])
