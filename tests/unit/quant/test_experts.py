"""Conversions of a model with experts, whatever the number of steps that a layer takes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import small_config
from resumed import Crash, after, before, crash, results
from stage_runs import calibrated_on, foreign_measurement, prepared, run_until, text_parquet
from tiny import make_tiny, tiny_spec

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store import store
from exl2flow.core.store.stage import Pipeline
from exl2flow.engine.loading.load import load_model
from exl2flow.engine.loading.streamed import StreamedModel
from exl2flow.model import resolve
from exl2flow.model.config import resolution
from exl2flow.quant.measure.measurement import read_measurement, slot_projections
from exl2flow.quant.quantize.matrix_work import read_report

EXPERT = 3 * 64 * 32  # weights
STEPS = {4: EXPERT, 2: 2 * EXPERT, 1: 1 << 27}  # steps of a layer's routed experts → most weights


def configuration(source: Path, out: Path, **values: object) -> ConversionConfig:
    calibration = calibrated_on(text_parquet(source.parent / "text.parquet"), (3, 64), (2, 64))
    options: dict[str, object] = {
        "quality": "standard",
        "sensitivity": {"rows": 2},
        "rounding": {"rounds": 1, "sweeps": 1},
    }
    given = {"calibration": calibration, "bpw": 4.0, **options, **values}
    return small_config(source, out, **given)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "qwen2-moe",
        tmp_path_factory.mktemp("experts") / "model",
        num_experts=4,
        num_hidden_layers=1,
    )


@pytest.fixture(scope="module")
def divided(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pipeline]:
    """Convert with a number of steps per layer; each only once."""
    made: dict[tuple[int, str], Pipeline] = {}

    def convert(steps: int, **values: object) -> Pipeline:
        key = steps, str(values)
        if key not in made:
            root = tmp_path_factory.mktemp(f"steps{steps}")
            shutil.copytree(source, root / "model")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(resolution, "GROUP_WEIGHTS", STEPS[steps])
                config = configuration(root / "model", root / "out", **values)
                made[key] = run_until(config, "compile")
        return made[key]

    return convert


def weights(pipeline: Pipeline) -> str:
    path = pipeline.config.out / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("steps", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {
                "allocate": {"rounds": 1},
                "tune": {"steps": 2, "tokens": 32, "held_out_rows": 1},
                "rounding": {"rounds": 1, "sweeps": 1, "expert_tokens": 400},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["standard", "everything"],
)
def test_bytes_do_not_depend_on_the_steps_of_a_layer(
    steps: int, options: dict[str, object], divided: Callable[..., Pipeline]
) -> None:
    assert weights(divided(steps, **options)) == weights(divided(1, **options))


def test_steps_of_a_layer_follow_from_its_shape(tmp_path: Path) -> None:
    spec = tiny_spec("qwen2-moe", tmp_path)

    groups = {most: _groups(spec, most) for most in (EXPERT, 3 * EXPERT, 4 * EXPERT, 1 << 27)}

    shared = 3 * 64 * 64  # of its own where it does not fit beside the last ones
    assert shared == 2 * EXPERT
    assert groups[EXPERT] == [*([1] * 8), 0]
    assert groups[3 * EXPERT] == [3, 3, 2, 0]
    assert groups[4 * EXPERT] == [4, 4, 0]
    assert groups[1 << 27] == [8]


def _groups(spec: object, most: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolution, "GROUP_WEIGHTS", most)
        again = resolve(spec.source_dir)  # type: ignore[attr-defined]
    groups = [s.group for s in again.sublayers if s.layer_index == 0 and s.group]
    assert [g.is_first for g in groups] == [True] + [False] * (len(groups) - 1)
    assert [g.has_shared for g in groups][-1]
    return [len(g.experts) for g in groups]


@pytest.mark.parametrize("stage", ["sensitivity", "measure", "quantize"])
@pytest.mark.parametrize("interval", [0.0, 3600.0], ids=["from saved states", "from the start"])
def test_a_run_that_ended_within_a_layer_is_resumed_to_the_same_bytes(
    stage: str,
    interval: float,
    divided: Callable[..., Pipeline],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = divided(2)
    monkeypatch.setattr(resolution, "GROUP_WEIGHTS", STEPS[2])
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", interval)
    pipeline = before(whole, stage, tmp_path / "work")

    with pytest.raises(Crash):
        pipeline.run(stage, progress=after(stage, 3, crash))  # of 4 sublayers of a layer
    pipeline.run(stage, progress=silent)

    assert results(pipeline, stage) == results(whole, stage)


def test_experts_report_their_tokens_and_the_routes_that_changed(
    divided: Callable[..., Pipeline],
) -> None:
    folder = divided(2).path("quantize") / "sublayers"
    reports = [read_report(path) for path in sorted(folder.iterdir())]
    experts = [report.experts for report in reports if report.experts is not None]

    counts = [sum(e.tokens.values()) for e in experts]
    tokens = 3 * 64 * 2  # rows, tokens, experts of each
    assert sum(counts) == tokens
    assert all(e.changed_routes is not None and 0 <= e.changed_routes < 0.2 for e in experts)
    for e in experts:
        few = [expert for expert, count in e.tokens.items() if count < 64]
        assert list(e.topped_up) == few


@torch.inference_mode()
def test_a_converted_model_is_loaded_whole_and_streamed_alike(
    divided: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = divided(2).config.out
    ids = torch.randint(0, 290, (2, 40), generator=torch.Generator().manual_seed(0))
    decoder = load_model(out, device="cpu").decoder
    assert [s.kind for s in decoder.spec.sublayers] == ["attention", "experts"]

    monkeypatch.setattr(resolution, "GROUP_WEIGHTS", STEPS[2])
    streamed = StreamedModel(out, torch.device("cpu"))

    assert len(streamed.spec.sublayers) == 4
    [states] = streamed.states([ids])
    assert torch.equal(torch.cat([decoder.hidden(row[None]) for row in ids]), states)


def test_a_measurement_of_exllamav2_chooses_for_all_experts_of_a_layer(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "model", num_hidden_layers=1)
    spec = resolve(source)
    path = foreign_measurement(tmp_path / "ours.json", spec)
    content = json.loads(path.read_text())
    measured = content["measurement"]
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    for sublayer in spec.sublayers:
        if sublayer.group is None:
            continue
        first = {p.name: names[p.role] for p in sublayer.projections[:3]}
        [part] = sublayer.parts
        measured[f"model.layers.{sublayer.layer_index}.block_sparse_moe"] = [
            {
                **{key: entry[key] for key in ("accuracy", "total_bits")},
                **{name: entry[ours] for ours, name in first.items()},
            }
            for entry in measured.pop(part.name)
        ]
    path.write_text(json.dumps(content))

    measurement = read_measurement(path, spec)

    projections = slot_projections(spec)
    experts = [name for name in measurement.decoder if name.endswith("block_sparse_moe")]
    assert len(experts) == spec.num_layers
    for name in experts:
        assert len(projections[name]) == 3 * 5
        for result in measurement.decoder[name]:
            by_role = {(p.role, result.params[p.name]) for p in projections[name]}
            assert len(by_role) == 3
    config = prepared(source, measurement=path, bpw=4.0)
    out = run_until(config, "compile").config.out
    assert load_model(out, device="cpu").spec.num_layers == spec.num_layers

    del measured[experts[0]][0]["w2"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"is not a measurement of .*w2"):
        read_measurement(path, spec)
