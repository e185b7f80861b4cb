"""The forecast for single stages, compared with what they write and hold."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conversions import small_config
from measurements import written_in_nats
from stage_runs import calibrated_on, text_parquet
from tiny import make_tiny

from exl2flow.core.errors import PreflightFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.runtime.progress import Tick
from exl2flow.core.store import store
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import resolve
from exl2flow.pipeline.stages import REFINE_STAGES, STAGES
from exl2flow.quant.allocate.budget import decoder_numel
from exl2flow.quant.forecast import preflight as preflight_module
from exl2flow.quant.forecast.needs import stage_needs, work_bytes
from exl2flow.quant.forecast.plan import BASE_MEMORY
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.quant.quantize.correction import paired_rows
from exl2flow.quant.tokenize.stage import FURTHER_ROWS
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.walk.needs import Card
from exl2flow.quant.walk.walk import STATE_FILES

ROWS, TOKENS, HIDDEN = 64, 64, 64
STATES = 4 * ROWS * TOKENS * HIDDEN
EVERYTHING: dict[str, object] = {
    "sensitivity": {"rows": 2},
    "allocate": {"rounds": 1},
    "rounding": {"rounds": 0, "correction": 0.5},
    "tune": {"steps": 2, "interval": 1, "tokens": 32},
}


def config_of(source: Path, **values: object) -> ConversionConfig:
    calibration = calibrated_on(
        text_parquet(source.parent / "text.parquet"), (ROWS, TOKENS), (8, 64)
    )
    return small_config(source, source.parent / "out", calibration=calibration, **values)


def needs_of(source: Path, **values: object) -> dict[str, Need]:
    return dict(preflight(config_of(source, **values), STAGES).needs)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"quality": "exllamav2"}, ["measure", "quantize"]),
        ({"quality": "fast"}, ["sensitivity", "measure", "quantize"]),
        ({"quality": "best"}, ["sensitivity", "measure", "allocate", "quantize", "tune"]),
    ],
)
def test_stages_that_will_run_are_forecast_in_order(
    values: dict[str, object], names: list[str], source: Path
) -> None:
    config = config_of(source, **values)

    plan = preflight(config, STAGES)

    assert list(plan.needs) == ["tokenize", *names, "compile"]
    ran = Pipeline(config, STAGES, device="cpu").stages
    assert [name for name in ran if name in plan.needs] == list(plan.needs)
    _, _, said = dict(plan.rows())["memory"].partition(": ")
    assert [part.split()[0] for part in said.split(", ")] == names


def test_what_the_model_writes_itself_is_forecast(source: Path) -> None:
    config = config_of(source)
    calibration = config.calibration.model_copy(update={"text": "self"})

    needs = preflight(config.model_copy(update={"calibration": calibration}), STAGES).needs

    assert next(iter(needs)) == "compose"
    assert needs["compose"].memory_bytes > (source / "model.safetensors").stat().st_size


def test_a_given_measurement_needs_no_measuring(source: Path, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "measurement.json", resolve(source))

    assert "measure" not in needs_of(source, measurement=path)


def test_refining_neither_measures_nor_allots(source: Path) -> None:
    config = RefinementConfig(
        source=source, model=source, out=source.parent / "out", quality="best", device="cpu"
    )

    assert list(stage_needs(config, REFINE_STAGES, resolve(source), None, packed=0)) == [
        "tokenize",
        "sensitivity",
        "refine",
        "tune",
        "compile",
    ]


def test_the_plan_names_the_need_of_the_greediest_stage(source: Path) -> None:
    plan = preflight(config_of(source, **EVERYTHING), STAGES)

    needs = plan.needs.values()
    assert plan.memory_bytes == BASE_MEMORY + max(need.memory_bytes for need in needs)
    kept = sum(need.kept_bytes for need in needs)
    assert plan.work_bytes == kept + max(need.passing_bytes for need in needs)
    said = json.loads(json.dumps(plan.to_json()))["needs"]
    assert said["quantize"] == asdict(plan.needs["quantize"])
    assert {"memory_bytes", "kept_bytes", "passing_bytes"} < set(said["quantize"])


def test_too_little_memory_names_the_stage(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(source, **EVERYTHING)
    need = preflight(config, STAGES).memory_bytes
    monkeypatch.setattr(preflight_module, "available_memory", lambda: need - 1)

    with pytest.raises(
        PreflightFailed, match=r"^the stage `tune` may need .* the whole model, .* no option lowers"
    ):
        preflight(config, STAGES)


def test_a_gpu_too_small_to_tune_on_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    config = config_of(source, tune={"steps": 1})
    need = tune_memory(resolve(source), config.tune, config.calibration.row_tokens)
    card = Card(name="small", memory=need)
    monkeypatch.setattr(Card, "of", lambda device, limit: card)
    monkeypatch.setattr(preflight_module, "resolve_device", lambda device: cuda)

    in_main = preflight(config, STAGES).needs["tune"].memory_bytes
    card = replace(card, memory=need - 1)
    preflight(config_of(source), STAGES)
    with pytest.raises(PreflightFailed, match=r"^the stage `tune` .* GPU's memory, .* `--device"):
        preflight(config, STAGES)
    assert in_main < need


def test_correction_needs_some_states_twice(source: Path) -> None:
    plain, corrected = (
        needs_of(source, rounding={"correction": strength}) for strength in (0.0, 0.5)
    )

    paired = len(paired_rows(ROWS)) * STATES // ROWS
    assert 0 < paired < STATES
    assert (
        corrected["quantize"].passing_bytes - plain["quantize"].passing_bytes
        == STATE_FILES * paired
    )
    assert plain["quantize"].passing_bytes == STATE_FILES * STATES
    assert corrected["quantize"].memory_bytes - plain["quantize"].memory_bytes >= paired
    assert corrected["measure"] == plain["measure"]


def test_trials_need_states_for_every_sublayer(source: Path, tmp_path: Path) -> None:
    deep = make_tiny("llama", tmp_path / "deep" / "model", num_hidden_layers=12)
    values = {"allocate": {"rounds": 1}}

    shallow, more = (needs_of(path, **values)["allocate"] for path in (source, deep))

    row = 4 * TOKENS * HIDDEN
    assert more.memory_bytes - shallow.memory_bytes == 2 * (12 - 2) * 4 * row  # four rows judge
    # 60 rows are left; every third is rounded on, entering and leaving; and 3 + 4 copies
    assert shallow.memory_bytes > (2 * 20 + 4 * (3 + 4)) * row
    assert "allocate" not in needs_of(source)


def test_few_rows_are_not_forecast_as_many(source: Path) -> None:
    few = {"rows": 2, "row_tokens": 64, "measure_rows": 1, "measure_row_tokens": 64}
    config = config_of(source, allocate={"rounds": 1})
    fewer = config_of(source, allocate={"rounds": 1}).model_copy(
        update={"calibration": config.calibration.model_copy(update=few)}
    )

    many, two = (preflight(c, STAGES).needs["allocate"].memory_bytes for c in (config, fewer))

    row = 4 * TOKENS * HIDDEN
    assert many - two == (2 * 20 + 7 * 4 - 2 * 1 - 7 * 1) * row


def test_tuning_needs_its_state_on_disk_and_the_matrices_again(source: Path) -> None:
    narrow, wide = (
        needs_of(source, tune={"steps": 1, "code_rate": rate})["tune"] for rate in (0, 1e-3)
    )

    spec = resolve(source)
    weights = decoder_numel(spec) + spec.head.in_features * spec.head.out_features
    plain = 2 * HIDDEN * spec.vocab_size
    assert narrow.kept_bytes == wide.kept_bytes
    assert narrow.kept_bytes > needs_of(source)["quantize"].kept_bytes + plain
    assert wide.passing_bytes - narrow.passing_bytes == STATE_FILES * 4 * 4 * weights
    assert wide.memory_bytes - narrow.memory_bytes > 4 * 4 * weights


def test_totals_add_what_stays_and_one_stage_at_a_time() -> None:
    needs = {
        "a": Need(memory_bytes=5, kept_bytes=10, passing_bytes=100),
        "b": Need(memory_bytes=7, kept_bytes=20, passing_bytes=30),
    }

    assert work_bytes(needs.values()) == 130


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.*") if path.suffix in (".json", ".safetensors"))


def test_disk_is_forecast_stage_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny("llama", tmp_path / "model", num_hidden_layers=2)
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", 0.0)
    config = config_of(source, **EVERYTHING)
    plan = preflight(config, STAGES)
    pipeline = Pipeline(config, STAGES, device="cpu")
    most = dict.fromkeys(plan.needs, 0)
    total = 0

    def sink(tick: Tick) -> None:
        nonlocal total
        most[tick.stage] = max(most[tick.stage], size_of(pipeline.path(tick.stage)))
        total = max(total, size_of(config.work_dir_root))

    for name in plan.needs:
        pipeline.run(name, progress=sink)

    slack = 60_000  # manifests, headers, the allocation
    for name, need in plan.needs.items():
        kept = size_of(pipeline.path(name))
        assert kept - slack < need.kept_bytes, name
        assert most[name] - slack < need.kept_bytes + need.passing_bytes, name
    # of the states' three files two are there between any two commits
    further = 8 * FURTHER_ROWS * TOKENS  # of a file that has as much
    assert total < plan.work_bytes < 1.5 * total + slack + further
