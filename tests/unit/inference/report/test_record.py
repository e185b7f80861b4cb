import json
from pathlib import Path
from typing import Any

import pytest

from exl2flow.core.reports import MatrixReport, SublayerReport
from exl2flow.core.store.stage import RECORD_FILE, SCORE_FILE
from exl2flow.inference.report.record import Record, read_record

RECORD = {
    "fingerprint": "f",
    "options": {"quality": "best", "bpw": 3.0, "head_bits": None},
    "allocation": {"objective": "nats", "value": 0.25},
    "predicted_kl": 0.3,
    "tuning": {"steps": 4},
    "layers": [{"name": "lm_head", "rel_err": 0.5}],
}
SCORES = {"fingerprint": "f", "score": {"kl_divergence": 0.4}, "calibration": None}


def read(folder: Path, record: object, scores: object = None) -> Record | None:
    (folder / RECORD_FILE).write_text(json.dumps(record))
    if scores is not None:
        (folder / SCORE_FILE).write_text(json.dumps(scores))
    return read_record(folder)


def test_record_and_score_are_read_together(tmp_path: Path) -> None:
    found = read(tmp_path, RECORD, SCORES)

    assert found is not None
    assert found.layers == (SublayerReport(name="lm_head", rel_err=0.5),)
    assert (found.series, found.is_tuned) == ("best", True)
    assert (found.allocated_kl, found.predicted_kl) == (0.25, 0.3)
    assert found.score == {"kl_divergence": 0.4}
    assert found.calibration is None


def test_a_score_of_an_earlier_model_in_the_folder_does_not_count(tmp_path: Path) -> None:
    found = read(tmp_path, RECORD, {**SCORES, "fingerprint": "other"})

    assert found is not None
    assert found.score is None


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_foreign_files_say_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / RECORD_FILE).write_text(content)
    (tmp_path / SCORE_FILE).write_text(content)

    assert read_record(tmp_path) is None


def test_a_record_that_lacks_everything_is_still_ours(tmp_path: Path) -> None:
    found = read(tmp_path, {"source": "/models/x"})

    assert found is not None
    assert (found.series, found.allocated_kl, found.predicted_kl) == (None, None, None)


def test_the_value_of_another_objective_is_no_divergence(tmp_path: Path) -> None:
    found = read(tmp_path, {**RECORD, "allocation": {"objective": "power 2", "value": 7.0}})

    assert found is not None
    assert found.allocated_kl is None


@pytest.mark.parametrize(
    ("options", "series"),
    [
        ({"bpw": 3.0, "head_bits": None}, "fast"),
        ({"bpw": 4.0, "head_bits": 6}, "fast"),
        ({"bpw": 4.0, "head_bits": 8}, "fast, head 8"),
        ({"bpw": None, "target_bytes": 10, "head_bits": None}, "fast, head free"),
        ({"bpw": None, "bpw_total": 4.0, "head_bits": 6}, "fast, head 6"),
        ({"bpw": 4.0, "allocate": {"prefer": "quality"}}, "fast"),
        ({"bpw": 4.0, "allocate": {"prefer": "speed"}}, "fast, speed"),
        ({"bpw": 4.0, "head_bits": 8, "allocate": {"prefer": "speed"}}, "fast, head 8, speed"),
    ],
)
def test_series_names_preset_head_bits_and_preference(
    tmp_path: Path, options: dict[str, Any], series: str
) -> None:
    found = read(tmp_path, {**RECORD, "options": {"quality": "fast", **options}})

    assert found is not None
    assert found.series == series


@pytest.mark.parametrize(
    ("experts", "series"), [({"layers": []}, "best, experts alike"), ({}, "best"), (3, "best")]
)
def test_experts_with_bits_by_layer_are_a_series_of_their_own(
    experts: object, series: str, tmp_path: Path
) -> None:
    options = {"quality": "best", "bpw": 3.0, "allocate": {"experts": "layer"}}

    found = read(tmp_path, {**RECORD, "options": options, "experts": experts})

    assert found is not None
    assert found.series == series


@pytest.mark.parametrize("key", ["layers", "allocation", "options", "predicted_kl", "tuning"])
@pytest.mark.parametrize("value", [3, "x", [3, {"name": []}], {"a": [1]}, 10**400])
def test_entries_of_foreign_types_count_as_absent(tmp_path: Path, key: str, value: object) -> None:
    found = read(tmp_path, {**RECORD, key: value}, {**SCORES, "score": value})

    assert found is not None
    assert not found.score or found.score == value
    assert all(isinstance(layer.name, str) for layer in found.layers)


def test_costs_of_foreign_types_count_as_unknown(tmp_path: Path) -> None:
    projections = {"a": {"nats": "1", "rel_err": [], "bpw": 3.0}, "b": 7}
    layers = [{"name": "mlp", "rel_err": "x", "projections": projections}]

    found = read(tmp_path, {**RECORD, "layers": layers})

    assert found is not None
    first = MatrixReport(name="a", key="mlp.a", bpw=3.0)
    second = MatrixReport(name="b", key="mlp.b")
    assert found.layers == (SublayerReport(name="mlp", matrices=(first, second)),)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000])
def test_files_that_cannot_be_read_say_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / RECORD_FILE).write_text(content)

    assert read_record(tmp_path) is None


def test_text_that_cannot_be_printed_is_replaced(tmp_path: Path) -> None:
    found = read(tmp_path, {**RECORD, "options": {"quality": "be\ud800st"}})

    assert found is not None
    assert found.series == "be?st, head free"
