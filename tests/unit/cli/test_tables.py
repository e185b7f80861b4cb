import io
from dataclasses import asdict, replace

import pytest
from rich.console import Console, RenderableType

from exl2flow.cli.output.console import printable
from exl2flow.cli.output.results import comparison_table, cost_table, print_report, score_table
from exl2flow.cli.output.tables import table_of
from exl2flow.core import words
from exl2flow.core.reports import MatrixReport, Report, RowSums, Score
from exl2flow.inference.report.comparison import Compared
from exl2flow.inference.report.tables import certainty_rows, scored_on
from exl2flow.inference.scoring.intervals import intervals

SCORE = {
    "model": "3bpw",
    "perplexity": 12.5,
    "reference_perplexity": 11.25,
    "kl_divergence": 0.04321,
    "kl_median": 0.01,
    "kl_p99": 0.5,
    "top1_agreement": 0.9,
    "tokens": 100,
    "bytes": 4_070_000,
}


def lines(table: RenderableType, width: int = 80) -> list[str]:
    """Return what a terminal of this width shows, with single blanks."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def cost(name: str, nats: float | None, params: str = "1:3b_64g s4") -> MatrixReport:
    key = f"model.layers.31.self_attn.{name}"
    return MatrixReport(name=name, key=key, params=params, bpw=3.25, nats=nats, rel_err=0.125)


@pytest.mark.parametrize(
    ("width", "params"), [(80, "0.25:4b_64g/0.75:3b_64g"), (100, "0.25:4b_64g/0.75:3b_64g s4")]
)
def test_most_costly_matrices_are_listed_and_neither_name_nor_number_is_cut(
    width: int, params: str
) -> None:
    chosen = "0.25:4b_64g/0.75:3b_64g s4"
    items = [cost(f"{letter}_proj", 0.1 * i, chosen) for i, letter in enumerate("kvogudqn")]

    table = cost_table(items)

    assert table is not None
    shown = lines(table, width)
    assert "3 of 8 matrices cause 64 % of the estimate" in shown[0]
    rows = [line for line in shown if line.startswith("31.")]
    assert rows[0] == f"31.self_attn.n_proj {params} 3.250 0.70 25.0 % 0.1250"
    assert len(rows) == 6


@pytest.mark.parametrize("costs", [[None], [0.5, None], [0.0]])
def test_without_costs_there_is_no_table(costs: list[float | None]) -> None:
    assert cost_table([cost(str(i), nats) for i, nats in enumerate(costs)]) is None


def test_score_shows_measured_and_estimated_divergence() -> None:
    report = {
        "score": SCORE,
        "calibration": {**SCORE, "kl_divergence": 0.03},
        "source_bytes": 10**7,
        "predicted_kl": 0.02,
    }

    shown = lines(score_table(Report.from_json(report)))

    assert "KL divergence, mean (nats) 0.04321" in shown
    assert "KL divergence, mean on calibration tokens 0.03000" in shown
    assert "KL divergence, estimated, sum over matrices 0.02000" in shown


def test_score_of_a_model_without_estimate_leaves_it_out() -> None:
    report = {"score": SCORE, "calibration": None, "source_bytes": 10**7}

    shown = lines(score_table(Report.from_json(report)))

    assert not [line for line in shown if "estimated" in line or "calibration" in line]


@pytest.mark.parametrize(
    ("bpw", "predicted", "row"),
    [
        (3.0, 0.03, "3bpw 3.000 4.07 MB 12.5000 0.04321 0.50000 0.03000 90.00 %"),
        (None, None, "3bpw – 4.07 MB 12.5000 0.04321 0.50000 – 90.00 %"),
    ],
)
def test_comparison_has_bits_and_estimate_on_80_columns(
    bpw: float | None, predicted: float | None, row: str
) -> None:
    model = Compared(
        label="3bpw",
        series=None,
        bpw=bpw,
        bytes=4_070_000,
        kl=0.04321,
        predicted_kl=predicted,
        score=Score.of("3bpw", SCORE),
    )

    assert row in lines(comparison_table([model]))


def test_names_are_escaped() -> None:
    model = Compared(label="[bold]x", series=None, bpw=None, bytes=1, kl=None, predicted_kl=None)

    assert any("[bold]x" in line for line in lines(comparison_table([model]), 120))


def test_a_report_replaces_control_characters_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "[b]\x1b]0;owned\x07\x9b2J"
    item = {"params": hostile, "bpw": 3.0, "nats": 0.5, "rel_err": 0.1}
    report = {
        "score": SCORE,
        "calibration": None,
        "source_bytes": 10**7,
        "layers": [{"name": hostile, "bpw": 3.0, "projections": {hostile: item}}],
        "warnings": [hostile],
        **dict.fromkeys(("sample", "model"), hostile),
    }

    print_report(Report.from_json(report), hostile)

    text = capsys.readouterr().out
    assert printable(text) == text
    assert text.count("[b]\ufffd]0;owned\ufffd\ufffd2J") >= 7


def test_a_report_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    empty = {
        "score": SCORE,
        "calibration": None,
        "source_bytes": 10**7,
        "sample": "",
        "warnings": [],
    }
    layers = [{"name": "lm_head", "bpw": 3.0, "projections": {}}]

    print_report(Report.from_json({**empty, "layers": layers, "model": "my out"}), "w")

    text = capsys.readouterr().out
    assert "exl2flow chat 'my out'" in text
    assert "to write a web page:   exl2flow report 'my out'" in text


@pytest.mark.parametrize("width", [60, 80])
def test_headers_do_not_break_in_words(width: int) -> None:
    row = {"matrix": "layers.0.self_attn.q_proj", "parameters": "0.1:4b_32g/0.9:3b_32g s4", "": "x"}

    found = lines(table_of([row | {"what": "one two three " * 9, "cost (nats)": "0.12345"}]), width)

    assert any("parameters" in line for line in found)


def known(label: str, size: int, shift: float) -> Compared:
    """Return a model with 8 rows, whose divergences differ."""
    sums = RowSums(
        tokens=(100,) * 8,
        losses=tuple(250.0 + row for row in range(8)),
        divergences=tuple(4.0 + shift + row / 8 for row in range(8)),
        agreements=(90,) * 8,
    )
    known_intervals = intervals(sums)
    assert known_intervals is not None
    score = Score.of(
        label, {**SCORE, "text": "t", "rows": asdict(sums), "intervals": asdict(known_intervals)}
    )
    return Compared(
        label=label, series="s", bpw=3.0, bytes=size, kl=0.04, predicted_kl=None, score=score
    )


def test_intervals_of_models_and_of_their_difference_fit_on_80_columns() -> None:
    rows = certainty_rows([known("2.75bpw", 1, 0.5), known("3.25bpw", 2, 0.0)])

    shown = lines(table_of(rows))
    (first,) = [line for line in shown if line.startswith("2.75bpw ")]
    assert first.endswith("90.00 % to 90.00 %")
    assert any("-0.00500 to -0.00500" in line for line in shown)
    assert not any("…" in line for line in shown)


def test_models_without_intervals_have_no_table_of_them() -> None:
    model = Compared(label="x", series=None, bpw=3.0, bytes=1, kl=0.1, predicted_kl=None)

    assert certainty_rows([model]) == []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "no intervals, because the scores of its rows were not recorded"),
        (7, "no intervals, because 7 rows are fewer than 8"),
        (8, "95 % intervals over 8 rows"),
    ],
)
def test_a_table_says_how_many_rows_its_intervals_rest_on(rows: int | None, words: str) -> None:
    sums = rows and {"tokens": (100,) * rows, "losses": (250.0,) * rows}
    score = Score.of("3bpw", {**SCORE, "rows": sums})

    assert score is not None
    assert scored_on(score).endswith(f"; {words}")


def report_of(score: Score, rows: int | None = None) -> Report:
    """Return a report of one conversion; with `rows`, the calibration text has only these."""
    other = asdict(score) | {"kl_divergence": 0.03}
    if rows is not None:
        sums = {"tokens": [100] * rows, "losses": [250.0] * rows}
        other |= {"rows": sums, "intervals": None}
    content = {"score": asdict(score), "calibration": other, "source_bytes": 10**7}
    return Report.from_json({**content, "predicted_kl": 0.02})


@pytest.mark.parametrize("perplexity", [12.5, 123.4567])
def test_a_report_shows_intervals_beside_its_figures(perplexity: float) -> None:
    score = known("x", 1, 0.0).score
    assert score is not None
    assert score.intervals is not None
    assert score.intervals.kl_divergence is not None
    bounds = replace(score.intervals, perplexity=(perplexity - 1, perplexity + 1))
    large = replace(score, tokens=1_638_400, perplexity=perplexity, intervals=bounds)
    figures = (
        (words.perplexity(perplexity), words.interval(bounds.perplexity, words.perplexity)),
        ("0.04321", words.interval(bounds.kl_divergence, words.divergence)),
        ("0.03000", words.interval(bounds.kl_divergence, words.divergence)),
        ("90.00 %", "90.00 % to 90.00 %"),
    )

    shown = lines(score_table(report_of(large)))

    for cells in figures:
        assert any(line.endswith(" ".join(cells)) for line in shown), (cells, shown)
    names = " ".join(line.split(" 0.0")[0] for line in shown if line.startswith("KL"))
    assert "KL divergence, estimated, sum over" in names
    assert "KL divergence, mean on calibration" in names
    assert not any("…" in line for line in shown)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "Validation: 95 % intervals over 8 rows"),
        (
            3,
            "Validation: held-out text: 95 % intervals over 8 rows; calibration text: no "
            "intervals, because 3 rows are fewer than 8",
        ),
    ],
)
def test_a_report_says_on_how_many_rows_its_intervals_rest(rows: int | None, said: str) -> None:
    score = known("x", 1, 0.0).score
    assert score is not None

    shown = " ".join(lines(score_table(report_of(score, rows))))

    assert said in shown
