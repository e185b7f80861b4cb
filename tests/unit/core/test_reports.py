"""Reports as types: what is written is read again, and foreign files are read as far as they go."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.core.reports import (
    AllocationReport,
    CalibrationReport,
    CarriedReport,
    ExpertsReport,
    ExpertTokens,
    Intervals,
    LayerExperts,
    MatrixReport,
    RowSums,
    Score,
    SublayerReport,
    TuningReport,
    matrices_of,
    sublayer_reports,
    total_nats,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NUMBER = st.none() | st.floats(allow_nan=False)
MATRICES = st.builds(
    MatrixReport,
    name=st.sampled_from(["q_proj", "down_proj"]),
    key=st.sampled_from(["m.q_proj", "elsewhere.k"]),
    params=st.none() | st.just("4.0 bpw"),
    rel_err=NUMBER,
    nats=NUMBER,
    bits=NUMBER,
    bpw=NUMBER,
    sha256=st.none() | st.just("ab"),
)
EXPERTS = st.builds(
    ExpertTokens,
    tokens=st.dictionaries(st.integers(0, 200), st.integers(0, 10**9)),
    topped_up=st.lists(st.integers(0, 200)).map(tuple),
    least_tokens=st.integers(0, 10**9),
    changed_routes=NUMBER,
)
SUBLAYERS = st.builds(
    SublayerReport,
    name=st.just("m"),
    matrices=st.lists(MATRICES, unique_by=lambda one: one.name, max_size=2).map(tuple),
    bits=NUMBER,
    bpw=NUMBER,
    rel_err=NUMBER,
    experts=st.none() | EXPERTS,
)


@given(report=SUBLAYERS)
def test_a_written_report_is_read_again(report: SublayerReport) -> None:
    again = SublayerReport.from_json(report.to_json())

    assert again.to_json() == report.to_json()
    assert again.experts == report.experts


@given(value=JSON)
def test_a_foreign_file_is_read_as_far_as_it_goes(value: Any) -> None:
    fields = value if isinstance(value, dict) else {}

    assert sublayer_reports(value) == () or isinstance(value, list)
    assert ExpertsReport.from_json(value).to_json()["warnings"] is not None
    assert SublayerReport.from_json({**fields, "name": "m"}).name == "m"
    for read in (RowSums.of, Intervals.of, CalibrationReport.from_json, TuningReport.from_json):
        read(value)
    CarriedReport.from_json(value)
    AllocationReport.from_json(fields)
    LayerExperts.from_json(fields)
    Score.of("m", fields)


def test_costs_add_up_if_each_is_known() -> None:
    known, unknown = MatrixReport(name="q", key="m.q", nats=0.5), MatrixReport(name="k", key="m.k")
    layers = [SublayerReport(name="m", matrices=(known, known)), SublayerReport(name="n")]

    assert total_nats(matrices_of(layers)) == 1.0
    assert total_nats([known, unknown]) is None
    assert total_nats([]) is None


@pytest.mark.parametrize(
    ("rows", "is_read"),
    [
        ({"tokens": [3], "losses": [1.5]}, True),
        ({"tokens": [3], "losses": [1.5, 2.0]}, False),
        ({"tokens": [0], "losses": [1.5]}, False),
        ({"tokens": [], "losses": []}, False),
        ({"losses": [1.5]}, False),
    ],
)
def test_sums_of_rows_are_read_if_they_are_whole(rows: dict[str, Any], is_read: bool) -> None:
    assert (RowSums.of(rows) is not None) is is_read


@pytest.mark.parametrize("lacking", ["perplexity", "tokens", "bytes"])
def test_a_score_without_its_main_figures_is_none(lacking: str) -> None:
    figures = {"perplexity": 9.5, "tokens": 10, "bytes": 20, "later": 1}

    score = Score.of("m", figures)

    assert score is not None
    assert (score.perplexity, score.tokens, score.bytes, score.kl_divergence) == (9.5, 10, 20, None)
    assert Score.of("m", {key: value for key, value in figures.items() if key != lacking}) is None
