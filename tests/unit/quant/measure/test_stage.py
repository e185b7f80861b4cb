"""Measuring sublayers' errors: the file's schema, its accuracies, and what stops or marks it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import small_config
from roundings import make_singular
from stage_runs import calibrated_on, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.errors import QuantizationError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.files import read_json
from exl2flow.core.store.store import StageFolder
from exl2flow.model import DenseLinear, TensorFiles, build_sublayer
from exl2flow.quant.measure import stage as measure_module
from exl2flow.quant.measure.candidates import candidates_for
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE, read_measurement
from exl2flow.quant.measure.stage import undominated
from exl2flow.quant.rounding.error_feedback import RoundingJob, padded_weight, round_matrices
from exl2flow.quant.rounding.hessian import HessianSum, MixedHessian, collect_hessians, factor
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.walk.source_model import SourceModel


@pytest.fixture
def config(tmp_path: Path) -> ConversionConfig:
    """One layer, few and short rows."""
    source = make_tiny("llama", tmp_path / "model", num_hidden_layers=1)
    calibration = calibrated_on(text_parquet(tmp_path / "text.parquet"), (1, 32), (1, 32))
    return small_config(
        source, tmp_path / "out", calibration=calibration, sensitivity={"kind": "error"}
    )


@pytest.fixture
def converted(converted_as_exllamav2: Any) -> Any:
    """The conversion whose measurement is looked into."""
    return converted_as_exllamav2


@pytest.fixture
def written(converted: Any) -> dict[str, Any]:
    """The content of a measurement of ours."""
    content: dict[str, Any] = read_json(converted.path("measure") / MEASUREMENT_FILE)
    return content


def test_schema_is_that_of_exllamav2(written: dict[str, Any], converted: Any) -> None:
    names = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp")]
    parts = [part for sublayer in converted.spec.sublayers for part in sublayer.parts]
    rows = {part.name: candidates_for(part) for part in parts}

    assert set(written) == {"measurement", "last_module_idx", "exl2flow"}
    assert set(written["measurement"]) == {*names, "model.norm.norm", "lm_head.linear"}
    assert [name for name in written["measurement"] if name in names] == names
    assert written["measurement"]["model.norm.norm"] is None
    assert written["measurement"]["lm_head.linear"] is None
    assert written["last_module_idx"] == 6  # embedding 0, four sublayers, norm, head
    for name in names:
        entries = written["measurement"][name]
        table = [{p: params.to_json() for p, params in c.items()} for c in rows[name]]
        places = [table.index({p: entry[p] for p in table[0]}) for entry in entries]
        assert places == sorted(places)
        assert len(table) - 3 <= len(places) <= len(table)  # without those that others dominate
        assert places[-1] == len(table) - 1
        for entry in entries:
            assert list(entry) == ["accuracy", "total_bits", *table[0]]
            for projection in table[0]:
                assert all(isinstance(size, str) for size in entry[projection]["group_size"])


def test_file_says_what_makes_it_reproducible(written: dict[str, Any], converted: Any) -> None:
    ours = written["exl2flow"]

    assert ours["fingerprint"] == converted.pipeline.refs["measure"].fingerprint
    assert ours["options"]["measure_rows"] == 3
    assert ours["versions"]["torch"] == str(torch.__version__)
    assert ours["notes"] == []


def test_own_measurement_is_read_back_as_it_was(written: dict[str, Any], converted: Any) -> None:
    found = read_measurement(converted.path("measure") / MEASUREMENT_FILE, converted.spec)

    assert list(found.decoder) == [sublayer.name for sublayer in converted.spec.sublayers]
    for name, results in found.decoder.items():
        assert [result.to_json() for result in results] == written["measurement"][name]
    assert list(found.head) == []


def test_more_bits_are_more_accurate(written: dict[str, Any]) -> None:
    for entries in written["measurement"].values():
        if entries:
            assert 0.3 < entries[0]["accuracy"] < entries[6]["accuracy"] < entries[-1]["accuracy"]
            assert entries[-1]["accuracy"] > 0.99
            assert entries[0]["total_bits"] < entries[6]["total_bits"] < entries[-1]["total_bits"]


@pytest.mark.parametrize(("index", "option"), [(0, 0), (2, 4), (2, 16), (3, 8), (3, 9)])
def test_accuracy_is_one_minus_the_mean_relative_error_on_reference_states(
    index: int, option: int, written: dict[str, Any], converted: Any
) -> None:
    model = SourceModel.open(converted.config, "cpu")
    states = model.initial_states(load_rows(converted.path("tokenize"), "measure"))
    with torch.inference_mode():
        for earlier in model.spec.sublayers[:index]:
            states = model.sublayer(earlier)(states)  # unquantized
        sublayer = model.sublayer(model.spec.sublayers[index])
        reference = sublayer(states)
        captured = sublayer.reads(states)
        candidate = candidates_for(sublayer.spec.parts[0])[option]
        rounded = {}
        for projection in sublayer.spec.projections:
            total = HessianSum(projection.in_features)
            for row in captured[projection.capture]:
                total.add(row)
            weight = padded_weight(sublayer.linears[projection.name])
            job = RoundingJob(weight=weight, params=candidate[projection.name])
            item = factor(MixedHessian.plain(total.mean()), damping=0.12, name="")
            matrix = next(round_matrices([job], item, search="grid")).dequantize()
            rounded[projection.name] = matrix.float().T[: projection.out_features].contiguous()
        for name, weight in rounded.items():
            sublayer.linears[name] = DenseLinear(weight, sublayer.linears[name].bias)
        found = sublayer(states)

    errors = [(y - r).norm() / r.norm() for y, r in zip(found, reference, strict=True)]
    entry = next(
        entry
        for entry in written["measurement"][sublayer.spec.name]
        if all(entry[name] == params.to_json() for name, params in candidate.items())
    )
    # fp32 sums in another order may move single codes by one
    assert entry["accuracy"] == pytest.approx(1 - float(sum(errors)) / 3, abs=2e-4)


def test_dominated_candidates_are_not_run(converted: Any) -> None:
    (part,) = converted.spec.sublayers[0].parts
    few, more, odd, most = (candidates_for(part)[place] for place in (0, 6, 12, 18))
    costs = {
        (name, candidate[name]): cost
        for candidate, cost in ((few, 5.0), (more, 2.0), (odd, 3.0), (most, 4.0))
        for name in candidate
    }

    assert undominated(part, (few, more, odd, most), costs) == (few, more, most)

    costs["q_proj", odd["q_proj"]] = 1.0  # better in a single projection
    assert undominated(part, (few, more, odd, most), costs) == (few, more, odd, most)


def test_costs_that_are_no_numbers_dominate_nothing(converted: Any) -> None:
    (part,) = converted.spec.sublayers[0].parts
    rows = candidates_for(part)
    costs = {(name, row[name]): math.nan for row in rows for name in row}

    assert undominated(part, rows, costs) == rows


@pytest.mark.parametrize("errors", [1.5, math.nan, math.inf])
def test_accuracy_has_a_floor(
    errors: float, config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad_but_one(*args: Any) -> list[float]:
        return [errors] * (len(args[-2]) - 1) + [0.25]  # of the candidates

    monkeypatch.setattr(measure_module, "_candidate_errors", bad_but_one)

    content = read_json(run_until(config, "measure").path("measure") / MEASUREMENT_FILE)

    accuracies = [entry["accuracy"] for entry in content["measurement"]["model.layers.0.mlp"]]
    assert accuracies == [1e-6] * (len(accuracies) - 1) + [0.75]


def test_hopeless_sublayer_stops_the_run(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "_candidate_errors", lambda *args: [0.91] * len(args[-2]))

    with pytest.raises(
        QuantizationError, match=r"`model\.layers\.0\.self_attn` only reaches accuracy 0\.090"
    ):
        run_until(config, "measure")


def test_remedy_is_recorded_and_the_run_goes_on(
    config: ConversionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_singular(monkeypatch)

    pipeline = run_until(config, "measure")

    folder = StageFolder.load(pipeline.path("measure"), pipeline.refs["measure"].fingerprint)
    expected = [
        f"model.layers.0.{part}.{capture}: identity Hessian"
        for part in ("self_attn", "mlp")
        for capture in ("input", "inner")
    ]
    assert folder is not None
    assert folder.manifest.notes == expected
    content = read_json(folder.path / MEASUREMENT_FILE)
    assert content["exl2flow"]["notes"] == sorted(expected)
    entries = content["measurement"]["model.layers.0.mlp"]
    assert entries[-1]["accuracy"] > 0.98


def test_source_is_not_changed(converted: Any) -> None:
    spec = converted.spec
    tensors = TensorFiles(spec.source_dir)
    states = SourceModel.open(converted.config, "cpu").initial_states(torch.arange(8)[None])
    before = states.clone()
    sublayer = build_sublayer(spec, spec.sublayers[0], tensors, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        hessians, outputs = collect_hessians(sublayer, states)

    assert torch.equal(states, before)
    assert {name: h.shape for name, h in hessians.items()} == {"input": (64, 64), "inner": (64, 64)}
    assert list(outputs) == [0]
