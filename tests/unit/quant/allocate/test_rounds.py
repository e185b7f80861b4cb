"""Further rounds of allocation: what is tried, which is kept, and how costs are corrected."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conversions import small_config
from measurements import OPTIONS, decoder_projections, measured_in_nats, written_in_nats
from resumed import before
from stage_runs import calibrated_on, foreign_measurement, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import HELD_OUT_ROWS, AllocateOptions, ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.allocate.budget import (
    ALLOCATION_FILE,
    Allocation,
    allocate_bits,
    decoder_numel,
    read_choice,
    total_target,
)
from exl2flow.quant.allocate.layout import output_bytes
from exl2flow.quant.allocate.stage import CORRECTION_RANGE, corrected, uniform_allocation
from exl2flow.quant.allocate.trials import Trials
from exl2flow.quant.measure.candidates import HEAD_PARAMS
from exl2flow.quant.measure.measurement import Measurement, projection_bits
from exl2flow.quant.tokenize.stage import split_rows
from exl2flow.quant.walk.source_model import SourceModel

ROUNDS = 2


class Case(NamedTuple):
    """A target, made-up costs whose seed leads to what is kept, and whether correcting helps."""

    target: dict[str, float]
    seed: int
    kept: str
    helps: bool


# Made-up costs know nothing of the model, so that every outcome is to be had
CASES = {
    "the estimate": Case({"bpw": 3.5}, 1, "estimate", False),
    "the first correction": Case({"bpw": 3.5}, 6, "corrected 1", True),
    "the second correction": Case({"bpw": 3.5}, 2, "corrected 2", True),
    "the same for all": Case({"bpw": 5.0}, 3, "uniform", True),
    "the second correction within a total": Case({"bpw_total": 9.0}, 5, "corrected 2", True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Rows and factors, on which every case goes on."""
    folder = tmp_path_factory.mktemp("improve")
    calibration = calibrated_on(text_parquet(folder / "text.parquet"), (6, 64), (2, 64))
    config = small_config(
        make_tiny("llama", folder / "model"),
        folder / "out",
        calibration=calibration,
        sensitivity={"rows": 2},
        allocate={"rounds": ROUNDS},
        work_root=folder / "work",
    )
    return run_until(config, "sensitivity")


@pytest.fixture(scope="module")
def spec(base: Pipeline) -> ModelSpec:
    return resolve(base.config.source)


def config_of(base: Pipeline, measurement: Path, **values: object) -> ConversionConfig:
    given = base.config.model_dump(exclude={"bpw"}) | {"measurement": measurement} | values
    return ConversionConfig.model_validate(given)


def allocated(config: ConversionConfig) -> Pipeline:
    return run_until(config, "allocate")


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def done(case: Case, base: Pipeline, spec: ModelSpec) -> Pipeline:
    """Allocated for a case."""
    path = base.config.work_dir_root / f"measurement-{case.seed}.json"
    return allocated(config_of(base, written_in_nats(path, spec, seed=case.seed), **case.target))


def allocation_of(pipeline: Pipeline) -> dict[str, Any]:
    content: dict[str, Any] = read_json(pipeline.path("allocate") / ALLOCATION_FILE)
    return content


def tried(pipeline: Pipeline) -> dict[str, float]:
    """Return name → divergence of the allocations that were tried."""
    return {entry["name"]: entry["kl"] for entry in allocation_of(pipeline)["tried"]}


@torch.inference_mode()
def judged(pipeline: Pipeline, choice: dict[str, QuantParams]) -> float:
    training, held_out = split_rows(pipeline.path("tokenize"), HELD_OUT_ROWS)
    config = pipeline.config
    model = SourceModel.open(config, "cpu")
    trials = Trials(model, pipeline.path("sensitivity"), config.rounding, training)
    return trials.judge({"": choice}, held_out).divergences[""]


def test_the_best_of_what_was_tried_is_kept(case: Case, done: Pipeline) -> None:
    found = tried(done)

    kept = judged(done, read_choice(done.path("allocate")))

    assert min(found, key=found.__getitem__) == case.kept
    assert kept == pytest.approx(found[case.kept], rel=1e-3)  # sums in fp32, in other company
    assert all(kl > 1.01 * kept for name, kl in found.items() if name != case.kept)
    assert (found["corrected 1"] < found["estimate"]) == case.helps


def test_rounds_end_with_the_first_that_is_no_better(case: Case, done: Pipeline) -> None:
    names = list(tried(done))
    values = tried(done)

    rounds = names[2:]
    assert names[:2] == ["estimate", "uniform"]
    assert rounds == [f"corrected {i + 1}" for i in range(len(rounds))]
    best = min(values["estimate"], values["uniform"])
    for name in rounds[:-1]:
        assert values[name] < best
        best = values[name]
    assert len(rounds) == ROUNDS or values[rounds[-1]] >= best


def test_the_budget_is_kept_whichever_is_taken(case: Case, done: Pipeline, spec: ModelSpec) -> None:
    choice = read_choice(done.path("allocate"))

    bits = sum(projection_bits(p, choice[p.key]) for p in decoder_projections(spec))
    if "bpw" in case.target:
        assert bits <= decoder_numel(spec) * case.target["bpw"]
        assert choice[spec.head.key] == HEAD_PARAMS[6]
    else:
        size = output_bytes(spec, choice, done.config.shard_size_mb)
        assert 0.9 * total_target(done.config, spec) < size <= total_target(done.config, spec)


def test_reported_bits_are_those_of_the_stored_tensors(done: Pipeline, spec: ModelSpec) -> None:
    found = allocation_of(done)
    choice = read_choice(done.path("allocate"))

    slots = [p for p in (*decoder_projections(spec), spec.head) if p.key in found["choice"]]
    assert len(slots) == len(found["choice"])
    assert found["used_bits"] == sum(projection_bits(p, choice[p.key]) for p in slots)
    assert found["bpw"] == pytest.approx(found["used_bits"] / found["numel"])
    assert found["used_bits"] <= found["budget_bits"]
    for p in slots:
        assert QuantParams.from_json(found["choice"][p.key][p.name]) == choice[p.key]


def test_uniform_allocation_has_one_set_of_parameters(
    case: Case, done: Pipeline, spec: ModelSpec
) -> None:
    choice = read_choice(done.path("allocate"))

    distinct = {choice[p.key] for p in decoder_projections(spec)}

    assert (len(distinct) == 1) == (case.kept == "uniform")


def test_a_rerun_gives_the_same_bytes(base: Pipeline, spec: ModelSpec, tmp_path: Path) -> None:
    case = CASES["the second correction within a total"]
    measurement = written_in_nats(tmp_path / "measurement.json", spec, seed=case.seed)
    config = config_of(base, measurement, **case.target)
    first = allocated(config)  # perhaps by another test
    again = before(first, "allocate", tmp_path)

    again.run("allocate", progress=silent)

    written = [(p.path("allocate") / ALLOCATION_FILE).read_bytes() for p in (first, again)]
    assert written[0] == written[1]


def test_without_rounds_nothing_is_tried(base: Pipeline, spec: ModelSpec, tmp_path: Path) -> None:
    measurement = written_in_nats(tmp_path / "measurement.json", spec)

    pipeline = allocated(config_of(base, measurement, bpw=4, allocate={"rounds": 0}))

    assert tried(pipeline) == {}


@pytest.mark.parametrize("kind", ["fisher", "error"])
def test_costs_that_are_not_in_nats_are_refused(
    kind: str, base: Pipeline, spec: ModelSpec, tmp_path: Path
) -> None:
    measurement = foreign_measurement(tmp_path / "measurement.json", spec)
    sensitivity = {"kind": kind, "rows": 2}
    config = config_of(base, measurement, bpw=4, sensitivity=sensitivity)

    with pytest.raises(ConfigError, match="further rounds of allocation need costs in nats"):
        allocated(config)


def allocation_with(spec: ModelSpec, measurement: Measurement, bpw: float = 4.0) -> Allocation:
    budget = int(decoder_numel(spec) * bpw)
    return allocate_bits(spec, measurement.decoder, budget=budget, options=AllocateOptions())


def test_costs_are_scaled_to_the_effect_of_a_sublayer_among_quantized_ones(spec: ModelSpec) -> None:
    measurement = measured_in_nats(spec)
    allocation = allocation_with(spec, measurement)
    total = 1000.0
    parts = {
        s.name: sum(allocation.choice[p.key].nats or 0 for p in s.projections)
        for s in spec.sublayers
    }
    low, high = CORRECTION_RANGE
    scales = dict(zip(parts, (0.7, 3.0, 2 * high, -1.0), strict=True))
    without = {name: total - scales[name] * part for name, part in parts.items()}

    found = corrected(spec, measurement, allocation, without, total)

    expected = dict(zip(parts, (0.7, 3.0, high, low), strict=True))
    for sublayer in spec.sublayers:
        for p in sublayer.projections:
            for old, new in zip(measurement.decoder[p.key], found.decoder[p.key], strict=True):
                assert old.nats is not None
                wanted = expected[sublayer.name] * old.nats
                assert new.nats == pytest.approx(wanted, rel=1e-9, abs=1e-9)
                assert replace(new, nats=old.nats) == old
    assert found.head is measurement.head
    assert list(found.decoder) == list(measurement.decoder)


def test_costs_of_zero_are_not_scaled(spec: ModelSpec) -> None:
    measurement = measured_in_nats(spec)
    free = spec.sublayers[1]
    decoder = dict(measurement.decoder)
    for p in free.projections:
        decoder[p.key] = decoder[p.key].scaled(0.0)
    measurement = replace(measurement, decoder=decoder)
    allocation = allocation_with(spec, measurement)

    without = {s.name: 0.0 for s in spec.sublayers}
    found = corrected(spec, measurement, allocation, without, 1.0)

    for p in free.projections:
        assert found.decoder[p.key] is measurement.decoder[p.key]


def allotted(spec: ModelSpec, measurement: Measurement, bpw: float, *, head: int) -> Allocation:
    allocation = allocation_with(spec, measurement, bpw)
    return replace(allocation, params={**allocation.params, spec.head.key: HEAD_PARAMS[head]})


@pytest.mark.parametrize("bpw", [3.5, 4.2, 5.7])
@pytest.mark.parametrize("seed", range(3))
def test_uniform_allocation_is_the_cheapest_that_fits(
    seed: int, bpw: float, spec: ModelSpec
) -> None:
    measurement = measured_in_nats(spec, seed=seed)
    first = allotted(spec, measurement, bpw, head=8)
    slots = decoder_projections(spec)
    budget = sum(projection_bits(p, first.params[p.key]) for p in slots)
    costs = {}
    for params in OPTIONS:
        picked = [
            result
            for p in slots
            for result in measurement.decoder[p.key]
            if result.params[p.name] == params
        ]
        if sum(result.total_bits for result in picked) <= budget:
            costs[params] = sum(result.nats or 0 for result in picked)

    allocation = uniform_allocation(spec, measurement, first)

    best = min(costs, key=costs.__getitem__)
    assert 1 < len(costs) < len(OPTIONS)
    head = {spec.head.key: HEAD_PARAMS[8]}
    assert allocation.params == {**dict.fromkeys((p.key for p in slots), best), **head}
    assert allocation.value == pytest.approx(costs[best])


def test_where_no_uniform_one_fits_the_first_stays(spec: ModelSpec) -> None:
    projections = decoder_projections(spec)
    smallest, *larger = sorted(OPTIONS, key=lambda o: projection_bits(projections[0], o))
    all_smallest = measured_in_nats(spec, options=[smallest])
    first = allotted(spec, all_smallest, 8, head=6)

    found = uniform_allocation(spec, measured_in_nats(spec, options=larger), first)

    assert found is first
    assert {first.params[p.key] for p in projections} == {smallest}
