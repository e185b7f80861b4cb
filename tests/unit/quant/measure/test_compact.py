"""Measurements of very many slots: numbers in arrays, of which nothing foreign is believed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import small_config
from measurements import measured_in_nats
from safetensors.torch import load_file, save_file
from stage_runs import one_layer, run_until
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import AllocateOptions, ConversionConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.store.files import digest, read_json
from exl2flow.core.store.source import SourceFingerprint
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import StageFolder
from exl2flow.inference.report.frames import measurement_frame
from exl2flow.model import ModelSpec, TensorFiles, resolve
from exl2flow.quant.allocate.budget import Allocation, allocate_bits, decoder_numel, read_candidates
from exl2flow.quant.allocate.stage import corrected, uniform_allocation
from exl2flow.quant.measure import compact as compact_module
from exl2flow.quant.measure.candidates import candidates_for, parse_params
from exl2flow.quant.measure.compact import is_compact, write_compact, write_results
from exl2flow.quant.measure.measurement import (
    MEASUREMENT_FILE,
    Measurement,
    candidate_bits,
    read_measurement,
)
from exl2flow.quant.measure.results import Results
from exl2flow.quant.measure.stage import entry_bytes

ARRAYS_FILE = "measurement.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model whose columns must be padded and whose attention has biases."""
    return resolve(make_tiny("qwen2", tmp_path_factory.mktemp("model"), head_dim=24))


def rounded(results: Results) -> Results:
    """Return results with numbers that fp32 holds."""
    nats = None if results.nats is None else results.nats.astype(np.float32).astype(np.float64)
    accuracy = results.accuracy.astype(np.float32).astype(np.float64)
    return replace(results, accuracy=accuracy, nats=nats)


def slots_of(spec: ModelSpec) -> dict[str, Results]:
    measurement = measured_in_nats(spec)
    slots = {**measurement.decoder, spec.head.key: measurement.head}
    return {name: rounded(results) for name, results in slots.items()}


def written(path: Path, slots: dict[str, Results], *, compact: bool) -> Path:
    """Write a measurement in one of the two forms."""
    further = {"measurement": {}, "last_module_idx": 6}
    if compact:
        write_compact(path, slots, further)
    else:
        write_results(path, slots, compact=False)
        path.write_text(json.dumps({**further, "measurement": read_json(path)}))
    return path


@pytest.fixture
def path(spec: ModelSpec, tmp_path: Path) -> Path:
    """A measurement with arrays."""
    return written(tmp_path / MEASUREMENT_FILE, slots_of(spec), compact=True)


def both(spec: ModelSpec, folder: Path) -> list[Measurement]:
    slots = slots_of(spec)
    paths = [written(folder / f"{form}.json", slots, compact=form) for form in (False, True)]
    return [read_measurement(path, spec) for path in paths]


def test_both_forms_hold_the_same(spec: ModelSpec, tmp_path: Path) -> None:
    plain, compact = both(spec, tmp_path)

    assert list(compact.decoder) == list(plain.decoder)
    for name, results in compact.decoder.items():
        assert list(results) == list(plain.decoder[name])
    assert list(compact.head) == list(plain.head)


def test_both_forms_are_allotted_alike(spec: ModelSpec, tmp_path: Path) -> None:
    def allocations(measurement: Measurement) -> list[Allocation]:
        budget = int(decoder_numel(spec) * 4.2)
        options = AllocateOptions()
        first = allocate_bits(spec, measurement.decoder, budget=budget, options=options)
        head = {spec.head.key: parse_params("6 g128")}
        first = replace(first, params={**first.params, **head})
        without = {sublayer.name: 0.1 for sublayer in spec.sublayers}
        other = corrected(spec, measurement, first, without, 0.5)
        second = allocate_bits(spec, other.decoder, budget=budget, options=options)
        return [first, uniform_allocation(spec, measurement, first), second]

    plain, compact = map(allocations, both(spec, tmp_path))

    assert plain == compact
    assert len({tuple(a.params.items()) for a in plain}) == 3


@pytest.mark.parametrize("prefer", ["quality", "speed"])
def test_a_preference_excludes_the_same_of_both(
    prefer: str, spec: ModelSpec, tmp_path: Path
) -> None:
    config = small_config(spec.source_dir, tmp_path / "out", allocate={"prefer": prefer})
    found = [
        read_candidates(config, spec, written(tmp_path / "m.json", slots_of(spec), compact=form))
        for form in (False, True)
    ]

    plain, compact = ({k: list(v) for k, v in m.decoder.items()} for m in found)
    assert plain == compact
    excluded = len(slots_of(spec)[Q_PROJ]) - len(plain[Q_PROJ])
    assert (excluded > 0) == (prefer == "speed")


def test_sublayers_without_costs_have_arrays_too(spec: ModelSpec, tmp_path: Path) -> None:
    slots: dict[str, Results] = {}
    for part in (part for sublayer in spec.sublayers for part in sublayer.parts):
        candidates = candidates_for(part)[: 9 + len(slots)]
        slots[part.name] = Results(
            candidates=candidates,
            bits=np.array([candidate_bits(part.projections, c) for c in candidates]),
            accuracy=np.full(len(candidates), 0.5),
        )

    found = read_measurement(written(tmp_path / "m.json", slots, compact=True), spec)

    assert list(found.decoder) == list(slots)
    for name, results in found.decoder.items():
        assert list(results) == list(slots[name])
    assert not found.head


def test_reports_read_both_forms(spec: ModelSpec, tmp_path: Path) -> None:
    slots = slots_of(spec)
    plain, compact = (
        measurement_frame(written(tmp_path / "m.json", slots, compact=form))
        for form in (False, True)
    )

    assert plain.equals(compact)


def edited(path: Path, edit: Callable[[Tensors], object]) -> None:
    """Change the arrays, and the digest that the JSON file names."""
    arrays = path.with_suffix(".safetensors")
    tensors = load_file(arrays)
    edit(tensors)
    save_file(tensors, arrays)
    content = read_json(path)
    content["arrays"]["sha256"] = digest(arrays)
    path.write_text(json.dumps(content))


def put(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name][0, 1].fill_(value)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (put("nats", float("nan")), f"`nats` of `{Q_PROJ}` is nan in option 1.*measure again"),
        (put("nats", float("inf")), "is inf"),
        (put("nats", -1.0), "is -1.0"),
        (put("accuracy", 1.5), "from 0 to 1; measure again"),
        (lambda t: t.update(nats=t["nats"][:-1].clone()), r"`nats` has shape \(14, 33\).*copy"),
        (lambda t: t.pop("accuracy"), "`accuracy` has shape None.*measure again"),
    ],
)
def test_impossible_arrays_are_refused(
    edit: Callable[[Tensors], object], problem: str, path: Path, spec: ModelSpec
) -> None:
    edited(path, edit)

    with pytest.raises(ConfigError, match=problem) as refusal:
        read_measurement(path, spec)

    assert str(path.with_suffix(".safetensors")) in str(refusal.value)


def test_missing_torn_and_foreign_arrays_are_refused(path: Path, spec: ModelSpec) -> None:
    arrays = path.with_suffix(".safetensors")
    remedy = "copy both files of the measurement into one folder, or measure again"
    data = arrays.read_bytes()
    for content in (data[:-40], data[:-1] + b"\1", b""):
        arrays.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{ARRAYS_FILE}` is damaged or belongs.*{remedy}"):
            read_measurement(path, spec)
        with pytest.raises(ConfigError, match=remedy):
            measurement_frame(path)
    arrays.unlink()
    with pytest.raises(ConfigError, match=f"{ARRAYS_FILE}`, which .*, is missing; {remedy}"):
        read_measurement(path, spec)


def test_a_file_that_is_not_safetensors_is_refused_in_spite_of_its_digest(
    path: Path, spec: ModelSpec
) -> None:
    arrays = path.with_suffix(".safetensors")
    arrays.write_bytes(b"torn")
    content = read_json(path)
    content["arrays"]["sha256"] = digest(arrays)
    path.write_text(json.dumps(content))

    with pytest.raises(ConfigError, match=f"cannot read .*{ARRAYS_FILE}"):
        read_measurement(path, spec)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("slots", {Q_PROJ: 99}),
        ("slots", {Q_PROJ: -1}),
        ("slots", {}),
        ("slots", None),
        ("options", [[{"total_bits": 3}]]),
        ("options", [[{"total_bits": 3, "bits": [9]}]]),
        ("sha256", None),
    ],
)
def test_damaged_lists_are_refused(entry: str, value: Any, path: Path, spec: ModelSpec) -> None:
    content = read_json(path)
    content["arrays"][entry] = value
    path.write_text(json.dumps(content))

    with pytest.raises(ConfigError, match=f"{MEASUREMENT_FILE}`.*measure again"):
        read_measurement(path, spec)
    with pytest.raises(ConfigError, match=MEASUREMENT_FILE):
        measurement_frame(path)


def test_a_measurement_of_another_model_is_refused(
    path: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    other = resolve(make_tiny("qwen2", tmp_path / "other", hidden_size=128, head_dim=24))
    deeper = resolve(make_tiny("qwen2", tmp_path / "deeper", num_hidden_layers=3, head_dim=24))

    with pytest.raises(ConfigError, match=f"bits for `{Q_PROJ}`, this model has"):
        read_measurement(path, other)
    with pytest.raises(ConfigError, match=r"`model\.layers\.2\.self_attn\.q_proj` is missing"):
        read_measurement(path, deeper)


def test_arrays_beside_a_model_are_none_of_its_weights(path: Path, tmp_path: Path) -> None:
    source, memory = make_tiny("llama", tmp_path / "model"), tmp_path / "digests.json"
    before = SourceFingerprint.of(source, memory=memory), TensorFiles(source).names

    for file in (path, path.with_suffix(".safetensors")):
        shutil.copy(file, source)

    assert (SourceFingerprint.of(source, memory=memory), TensorFiles(source).names) == before


def test_a_measurement_may_be_given_as_its_folder(path: Path, tmp_path: Path) -> None:
    config = ConversionConfig(source=tmp_path / "m", out=tmp_path / "o", measurement=path.parent)
    publication = PublishConfig(models=(tmp_path,), repo="a/b", measurement=path.parent)

    assert (config.measurement, publication.measurement) == (path, path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A small model measured as if it had very many matrices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_module, "MOST_ENTRIES", 7)
        folder = tmp_path_factory.mktemp("many")
        return run_until(one_layer(folder, hidden=32, intermediate=64, bpw=4.0), "allocate")


def test_the_stage_commits_both_files(
    measured: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StageFolder.load(measured.path("measure"), measured.refs["measure"].fingerprint)
    assert folder is not None
    spec = resolve(measured.config.source)
    found = read_measurement(folder.path / MEASUREMENT_FILE, spec)

    assert {MEASUREMENT_FILE, ARRAYS_FILE} < folder.manifest.files.keys()
    assert len(found.decoder) == 7
    plain = read_measurement(
        run_until(one_layer(tmp_path, hidden=32, intermediate=64, bpw=4.0), "measure").path(
            "measure"
        )
        / MEASUREMENT_FILE,
        spec,
    )
    for name, results in plain.decoder.items():
        assert list(found.decoder[name]) == list(rounded(results))
    assert list(found.head) == list(rounded(plain.head))


def test_the_forecast_covers_its_files(measured: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_module, "MOST_ENTRIES", 7)
    spec = resolve(measured.config.source)
    files = [path for path in measured.path("measure").rglob("*") if path.suffix != ".lock"]
    manifest = measured.path("measure") / "manifest.json"
    size = sum(path.stat().st_size for path in files if path.is_file() and path != manifest)

    assert size <= entry_bytes(spec)


def test_a_damaged_array_is_measured_again(measured: Pipeline) -> None:
    arrays = measured.path("measure") / ARRAYS_FILE
    data = arrays.read_bytes()
    arrays.write_bytes(data[:-1])

    assert not measured.is_complete("measure")
    arrays.write_bytes(data)
    assert measured.is_complete("measure")


def test_measure_copies_both_files_and_a_conversion_takes_them(
    measured: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compact_module, "MOST_ENTRIES", 7)
    source = measured.config.source

    def run(*words: object) -> str:
        given = ["--device", "cpu", "--work-root", tmp_path / "work"]
        given += ["--rows", 2, "--row-tokens", 32, "--measure-rows", 1, "--measure-row-tokens", 32]
        result = CliRunner().invoke(app, [str(word) for word in (*words, *given)])
        assert result.exit_code == 0, result.output
        return result.stdout

    run("measure", source, "--out", tmp_path / "m.json")
    folder = tmp_path / "kept"
    folder.mkdir()
    for name in ("m.json", "m.safetensors"):
        shutil.copy(tmp_path / name, folder / f"measurement{Path(name).suffix}")
    out = ("convert", source, "--out", tmp_path / "out", "--bpw", 4, "--dry-run")

    assert "4" in run(*out, "--measurement", folder)
    (folder / ARRAYS_FILE).unlink()
    refused = CliRunner().invoke(app, [str(w) for w in (*out, "--measurement", folder)])
    assert refused.exit_code
    assert ARRAYS_FILE in refused.output.replace("\n", "")


def test_only_very_many_slots_have_arrays() -> None:
    assert not is_compact(2000)
    assert is_compact(2001)
