"""What reports and record say of costs and rows: estimates of the very matrices that are stored."""

from typing import Any

import pytest
import torch
from backward_runs import read_factors

from exl2flow.core.reports import MatrixReport, SublayerReport, matrices_of, total_nats
from exl2flow.core.store.files import read_json, read_tensors
from exl2flow.core.store.stage import KINDS_FILE, RECORD_FILE
from exl2flow.model import QuantizedMatrix
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, read_report, result_files, sublayer_file
from exl2flow.quant.rounding.error_feedback import padded_weight
from exl2flow.quant.sensitivity.fisher import estimate
from exl2flow.quant.walk.source_model import SourceModel


def reports(converted: Any) -> list[SublayerReport]:
    folder = converted.path("quantize")
    return [read_report(folder / name) for name in result_files(converted.spec)]


@torch.inference_mode()
def test_nats_of_a_projection_are_those_of_the_stored_matrix(converted: Any) -> None:
    sublayer = SourceModel.open(converted.config, "cpu").sublayer(converted.spec.sublayers[1])
    path = converted.path("quantize") / sublayer_file(sublayer.spec)
    tensors, report = read_tensors(path), read_report(path)
    factors = read_factors(converted.path("sensitivity"), 1)

    for projection in sublayer.spec.projections:
        matrix = QuantizedMatrix.from_tensors(projection.key, tensors)
        error = matrix.dequantize().float() - padded_weight(sublayer.linears[projection.name])
        (found,) = [item for item in report.matrices if item.name == projection.name]
        assert found.nats == estimate(error, factors[projection.name]) > 0
        assert found.bpw == matrix.total_bits / error.numel()


def test_the_head_has_its_cost_too(converted: Any) -> None:
    report = read_report(converted.path("quantize") / HEAD_FILE)

    (matrix,) = report.matrices
    assert matrix.nats is not None
    assert matrix.nats > 0


def test_without_factors_costs_are_unknown(converted_as_exllamav2: Any) -> None:
    found = reports(converted_as_exllamav2)

    assert {item.nats for item in matrices_of(found)} == {None}
    assert read_json(converted_as_exllamav2.config.out / RECORD_FILE)["predicted_kl"] is None


def test_record_has_the_sum_of_all_costs_and_what_allocation_expected(converted: Any) -> None:
    record = read_json(converted.config.out / RECORD_FILE)

    costs = [item.nats or 0 for item in matrices_of(reports(converted))]
    assert len(costs) == 7 * 2 + 1
    assert record["predicted_kl"] == pytest.approx(sum(costs), rel=1e-12)
    assert record["allocation"]["objective"] == "nats"
    assert record["allocation"]["value"] > 0
    assert record["tuning"] is None


def test_a_sum_with_an_unknown_cost_is_unknown() -> None:
    first, second, unknown = (
        MatrixReport(name=name, key=name, nats=nats)
        for name, nats in (("a", 1.0), ("b", 2.0), ("c", None))
    )

    assert total_nats([first, second]) == 3.0
    assert total_nats([first, unknown]) is None
    assert total_nats([]) is None


def test_record_counts_the_kinds_of_rows(converted: Any) -> None:
    calibration = read_json(converted.config.out / RECORD_FILE)["calibration"]

    described = read_json(converted.path("tokenize") / KINDS_FILE)
    assert calibration["dataset"] == "text.parquet"
    for mix, rows in (("measure", 3), ("quantize", 5)):
        kinds = described[mix]["kinds"]
        assert calibration[mix]["kinds"] == {kind: kinds.count(kind) for kind in kinds}
        assert sum(calibration[mix]["kinds"].values()) == rows
        assert calibration[mix]["notes"] == described[mix]["notes"]
