"""Estimates of experts side by side against those of each by itself."""

import json
from pathlib import Path

import pytest
import torch
from conversions import small_config
from stage_runs import calibrated_on, run_until, text_parquet
from tiny import make_tiny

from exl2flow.model import SublayerSpec
from exl2flow.quant.measure import estimate
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE
from exl2flow.quant.quantize import dealt
from exl2flow.quant.quantize.matrix_work import read_report
from exl2flow.quant.rounding import together


def on_a_gpu(
    spec: SublayerSpec, captures: list[str], device: torch.device, **copies: int
) -> list[list[str]]:
    return together.runs_together(spec, captures, torch.device("cuda"), **copies)


def test_experts_cost_side_by_side_what_they_cost_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny("qwen2-moe", tmp_path / "model", num_hidden_layers=1, num_experts=4)
    calibration = calibrated_on(text_parquet(tmp_path / "text.parquet"), (3, 64), (3, 64))

    def converted(name: str) -> tuple[dict[str, object], dict[str, float]]:
        folder = tmp_path / name
        config = small_config(
            source,
            folder / "out",
            calibration=calibration,
            bpw=4.0,
            quality="standard",
            sensitivity={"rows": 2},
            rounding={"rounds": 1, "sweeps": 1},
            work_root=folder,
        )
        pipeline = run_until(config, "quantize")
        content = json.loads((pipeline.path("measure") / MEASUREMENT_FILE).read_bytes())
        reports = [
            read_report(path)
            for path in sorted((pipeline.path("quantize") / "sublayers").iterdir())
        ]
        errors = {
            f"{report.name}/{matrix.name}": matrix.rel_err
            for report in reports
            for matrix in report.matrices
        }
        return content["measurement"], errors

    alone, errors = converted("alone")
    monkeypatch.setattr(estimate, "runs_together", on_a_gpu)
    monkeypatch.setattr(dealt, "runs_together", on_a_gpu)
    beside, other_errors = converted("beside")

    assert list(alone) == list(beside)
    for slot, entries in alone.items():
        for entry, other in zip(entries or (), beside[slot] or (), strict=True):  # type: ignore[call-overload]
            assert other["total_bits"] == entry["total_bits"]
            assert other["nats"] == pytest.approx(entry["nats"], rel=0.05, abs=1e-9)
            assert other["accuracy"] == pytest.approx(entry["accuracy"], abs=0.005)
    assert errors.keys() == other_errors.keys()
    assert sum(other_errors.values()) == pytest.approx(sum(errors.values()), rel=0.02)
