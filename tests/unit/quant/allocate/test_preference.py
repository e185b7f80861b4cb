"""The preference for speed: which groups it allows, and which targets it reaches."""

import json
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config, snapshot
from measurements import decoder_projections, written_in_nats
from stage_runs import one_layer, run_until
from tiny import make_tiny

from exl2flow.core.errors import BudgetUnreachable, PreflightFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import RECORD_FILE, Pipeline
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.inference.report.page import write_up
from exl2flow.model import ModelSpec, resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.allocate.bit_range import BitRange, smallest_choice
from exl2flow.quant.allocate.budget import allot, read_candidates, read_choice
from exl2flow.quant.allocate.layout import output_bytes
from exl2flow.quant.allocate.stage import ALLOCATE
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.quant.measure.candidates import FAST_GROUP, PROJECTION_OPTIONS, parse_params
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE, read_measurement

SPEED = {"prefer": "speed"}
SHARED = ("tokenize", "sensitivity", "measure")
LOW, HIGH = 2.75, 4.0  # bits per weight; only the first needs 2 bits


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    shape = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}
    return resolve(make_tiny("llama", tmp_path_factory.mktemp("speed") / "model", **shape))


@pytest.fixture(scope="module")
def allotted(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model of one layer whose bits are allotted by default."""
    folder = tmp_path_factory.mktemp("switched")
    config = one_layer(folder, hidden=256, intermediate=256, bpw=LOW)
    return run_until(config, "allocate")


def config_of(spec: ModelSpec, **values: object) -> ConversionConfig:
    given = {"allocate": SPEED, **values}
    return small_config(spec.source_dir, spec.source_dir.parent / "out", **given)


def switched(pipeline: Pipeline, **values: object) -> Pipeline:
    """Return the pipeline of the same conversion with other options."""
    given = pipeline.config.model_dump(exclude_unset=True) | values
    return Pipeline(ConversionConfig.model_validate(given), STAGES, device="cpu")


def group_sizes(pipeline: Pipeline) -> set[int]:
    """Return the sizes of groups that were chosen for the layers."""
    choice = read_choice(pipeline.path("allocate"))
    return {s for key, params in choice.items() if key != "lm_head" for s in params.group_sizes}


@pytest.mark.parametrize("target", [{"bpw": 4.0}, {"bpw": 6.5}, {"bpw_total": 7.0}], ids=str)
def test_speed_allows_groups_of_128_and_any_head(
    target: dict[str, float], spec: ModelSpec, tmp_path: Path
) -> None:
    path = written_in_nats(tmp_path / "measurement.json", spec)
    config = config_of(spec, measurement=path, **target)
    everything = read_measurement(path, spec)

    measurement = read_candidates(config, spec, path)
    allocation = allot(config, spec, measurement)

    assert list(measurement.head) == list(everything.head)
    assert allocation.used_bits <= allocation.budget_bits
    for p in decoder_projections(spec):
        assert set(allocation.params[p.key].group_sizes) == {FAST_GROUP}
        fast = [r for r in everything.decoder[p.key] if "32g" not in str(r.params[p.name])]
        fast = [r for r in fast if "64g" not in str(r.params[p.name])]
        assert list(measurement.decoder[p.key]) == fast


def test_by_default_all_but_2_bits_in_groups_of_128_are_allowed(allotted: Pipeline) -> None:
    spec = resolve(allotted.config.source)
    path = allotted.path("measure") / MEASUREMENT_FILE
    everything, default = read_measurement(path, spec), read_candidates(allotted.config, spec, path)

    assert allotted.config.allocate.prefer == "quality"
    assert list(default.head) == list(everything.head)
    for p in decoder_projections(spec):
        left_out = [r.params[p.name] for r in everything.decoder[p.key]]
        for result in default.decoder[p.key]:
            left_out.remove(result.params[p.name])
        assert len(left_out) == 5  # 2 bits alone, and four shares of 3 bits
        for params in left_out:
            assert (params.bit_widths[-1], params.group_sizes[-1]) == (2, FAST_GROUP)


def test_allocations_from_before_the_preference_stay_valid(spec: ModelSpec) -> None:
    options = ALLOCATE.options(config_of(spec, allocate={}, bpw=3.0))

    assert options == {
        "target": {"bpw": 3.0, "bpw_total": None, "target_bytes": None, "fit": None},
        "head_bits": 6,
        "shard_size_mb": None,
        "allocate": {"objective": "power", "power": 2.0, "rounds": 0},
        "rounding": None,
        "measurement": None,
    }
    assert ALLOCATE.options(config_of(spec, bpw=3.0)) == {**options, "prefer": "speed"}


@pytest.mark.parametrize("bpw", [LOW, HIGH])
def test_switching_measures_nothing_again(bpw: float, allotted: Pipeline) -> None:
    before = [snapshot(allotted.path(name)) for name in SHARED]
    fast = switched(allotted, allocate=SPEED, bpw=bpw)

    assert list(fast.stages)[:4] == [*SHARED, "allocate"]
    assert all(fast.is_complete(name) for name in SHARED)
    fast.run("allocate", progress=silent)

    assert group_sizes(fast) == {FAST_GROUP}
    assert before == [snapshot(fast.path(name)) for name in SHARED]
    assert fast.refs["allocate"] != switched(allotted, bpw=bpw).refs["allocate"]
    choice = read_choice(fast.path("allocate")).values()
    assert bpw == HIGH or any(2 in params.bit_widths for params in choice)


def test_candidates_in_groups_of_128_are_those_in_groups_of_64() -> None:
    widths = [
        [(p.bit_widths, p.proportions) for p in PROJECTION_OPTIONS if set(p.group_sizes) == {size}]
        for size in (FAST_GROUP, 64)
    ]

    assert widths[0] == widths[1]


def test_2_bits_in_groups_of_128_cost_more_than_in_groups_of_64(allotted: Pipeline) -> None:
    spec = resolve(allotted.config.source)
    measured = read_measurement(allotted.path("measure") / MEASUREMENT_FILE, spec).decoder
    total = {FAST_GROUP: 0.0, 64: 0.0}

    for p in decoder_projections(spec):
        nats = {result.params[p.name]: result.nats for result in measured[p.key]}
        for size in total:
            total[size] += nats[parse_params(f"2 g{size}")] or 0.0

    # of a single matrix, whose factors come from a row, they may cost less
    assert 0 < total[64] < total[FAST_GROUP]


def test_model_record_plan_and_reports_say_what_was_preferred(allotted: Pipeline) -> None:
    fast = switched(allotted, allocate=SPEED, bpw=HIGH)
    names = list(fast.stages)
    plan = dict(preflight(fast.config, STAGES).rows())

    for name in names[names.index("allocate") :]:
        fast.run(name, progress=silent)

    out = fast.config.out
    *decoder, _ = inspect_model(out).parts
    assert {part.group_sizes for part in decoder} == {(FAST_GROUP,)}
    assert plan["prefer"] == "speed: groups of 128 rows in all layers"
    assert read_json(out / RECORD_FILE)["options"]["allocate"]["prefer"] == "speed"
    assert "<th>preferred</th><td>speed</td>" in write_up(out)
    report = fast.path("validate")
    assert read_json(report / "report.json")["prefer"] == "speed"
    assert "Speed was preferred" in (report / "report.md").read_text()


@pytest.mark.parametrize("kind", ["fisher", "error"])
def test_reach_is_that_of_groups_of_128(kind: str, spec: ModelSpec) -> None:
    sensitivity = {"kind": kind}

    low, high = BitRange.of(config_of(spec, sensitivity=sensitivity), spec).bpw

    least, most = BitRange.of(config_of(spec, sensitivity=sensitivity, allocate={}), spec).bpw
    assert least < 3
    assert high <= most
    assert low < least if kind == "fisher" else low > 5  # `error`: MLPs mix groups


@pytest.mark.parametrize("head_bits", [None, 6])
@pytest.mark.parametrize("kind", ["fisher", "error", "measured"])
def test_total_is_refused_exactly_below_the_smallest_output(
    kind: str, head_bits: int | None, spec: ModelSpec, tmp_path: Path
) -> None:
    if kind == "error" and head_bits is None:
        head_bits = 8  # errors do not choose the head's bits
    values: dict[str, Any] = {"sensitivity": {"kind": "error" if kind == "error" else "fisher"}}
    if kind == "measured":
        values["measurement"] = written_in_nats(tmp_path / "m.json", spec)
    config = config_of(spec, bpw=None, target_bytes=10**9, head_bits=head_bits, **values)
    least = output_bytes(spec, smallest_choice(config, spec), config.shard_size_mb)

    def asked(target: int) -> ConversionConfig:
        return config.model_copy(update={"target_bytes": target})

    reach = BitRange.of(config, spec)
    assert reach.packed_bytes(asked(least), spec) > 0
    with pytest.raises(BudgetUnreachable, match=f"smallest output has about {least:,}"):
        reach.packed_bytes(asked(least - 1), spec)
    assert reach.output_bytes[0] < least  # headers
    if kind == "measured":
        measured = read_candidates(config, spec, values["measurement"])
        assert allot(asked(least), spec, measured).params == smallest_choice(config, spec)
        with pytest.raises(BudgetUnreachable):
            allot(asked(least - 1), spec, measured)


def test_targets_that_need_smaller_groups_are_refused_with_a_way_out(spec: ModelSpec) -> None:
    config = config_of(spec, bpw=4.0, sensitivity={"kind": "error"})

    with pytest.raises(BudgetUnreachable, match=r"with `--bpw` or leave out `--prefer speed`$"):
        BitRange.of(config, spec).packed_bytes(config, spec)


def test_targets_that_need_2_bits_beside_a_given_measurement_are_refused(
    spec: ModelSpec, tmp_path: Path
) -> None:
    config = config_of(spec, bpw=3.0, measurement=written_in_nats(tmp_path / "m.json", spec))

    with pytest.raises(PreflightFailed, match=r"span 3\.\d+ to .* or leave out `--prefer speed`$"):
        preflight(config, STAGES)


def test_measurements_without_such_groups_are_refused_by_name(
    spec: ModelSpec, tmp_path: Path
) -> None:
    path = written_in_nats(tmp_path / "measurement.json", spec)
    content = json.loads(path.read_text())
    slot = content["measurement"]["model.layers.1.mlp.up_proj"]
    slot[:] = [entry for entry in slot if 128 not in entry["up_proj"]["group_size"].values()]
    path.write_text(json.dumps(content))

    with pytest.raises(
        PreflightFailed, match=r"json`: `model\.layers\.1\.mlp\.up_proj` lists no candidates in gr"
    ):
        preflight(config_of(spec, measurement=path), STAGES)
