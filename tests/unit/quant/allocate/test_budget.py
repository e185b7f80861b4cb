"""Bit allocation: the best choice within the budget, refused by name when out of reach."""

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config
from measurements import decoder_projections, measured_in_nats, written_in_nats
from stage_runs import calibrated_on, foreign_measurement, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.errors import BudgetUnreachable, ConfigError
from exl2flow.core.options.config import AllocateOptions, ConversionConfig
from exl2flow.core.store.files import read_json
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.allocate.budget import (
    ALLOCATION_FILE,
    allocate_bits,
    allocate_total,
    decoder_numel,
    read_choice,
    total_target,
)
from exl2flow.quant.allocate.layout import output_bytes
from exl2flow.quant.measure.candidates import HEAD_OPTIONS, HEAD_PARAMS, PROJECTION_OPTIONS
from exl2flow.quant.measure.measurement import (
    CandidateResult,
    Measurement,
    candidate_bits,
    projection_bits,
    read_measurement,
)
from exl2flow.quant.measure.results import Results

EXACT = 1e-9  # sums of doubles in another order
HEADER_SLACK = 64  # bytes by which offsets written out in digits may differ
SOME = (PROJECTION_OPTIONS[1], PROJECTION_OPTIONS[15])


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return resolve(make_tiny("llama", tmp_path / "model"))


@pytest.fixture
def single(tmp_path: Path) -> ModelSpec:
    """A model of one layer: seven projections and a head."""
    return resolve(make_tiny("llama", tmp_path / "single", num_hidden_layers=1))


def slots_of(spec: ModelSpec, *accuracies: Sequence[float]) -> dict[str, Results]:
    """Return candidates of the first sublayers that cost 100, 200 … bits."""
    return {
        sublayer.name: Results.of(
            [
                CandidateResult(
                    accuracy=accuracy,
                    total_bits=100 * (index + 1),
                    params={p.name: PROJECTION_OPTIONS[index] for p in sublayer.projections},
                )
                for index, accuracy in enumerate(row)
            ]
        )
        for sublayer, row in zip(spec.sublayers, accuracies, strict=False)
    }


def test_refusal_names_the_reachable_range(spec: ModelSpec) -> None:
    slots = slots_of(spec, (0.5, 0.9), (0.5, 0.9))
    numel = sum(p.in_features * p.out_features for p in decoder_projections(spec)[:7])

    with pytest.raises(BudgetUnreachable) as refusal:
        allocate_bits(spec, slots, budget=199, options=AllocateOptions())

    said = str(refusal.value)
    assert said.startswith(f"{199 / numel:.4g} bits per weight are out of reach")
    assert f"span {200 / numel:.3f} to {400 / numel:.3f}; ask for at least 0.01" in said


@pytest.mark.parametrize(
    ("objective", "power", "value"),
    [
        ("sum", 2.0, 0.1 + 0.3),
        ("power", 2.0, 0.1**2 + 0.3**2),
        ("power", 3.5, 0.1**3.5 + 0.3**3.5),
        ("log", 2.0, math.log(0.1) + math.log(0.3)),
    ],
)
def test_objective_is_what_its_name_says(
    objective: str, power: float, value: float, spec: ModelSpec
) -> None:
    options = AllocateOptions(objective=objective, power=power)

    allocation = allocate_bits(spec, slots_of(spec, (0.9,), (0.7,)), budget=200, options=options)

    assert allocation.value == pytest.approx(value)
    assert allocation.objective == (f"power {power:g}" if objective == "power" else objective)


def test_objective_decides_between_equal_bits(spec: ModelSpec) -> None:
    slots = slots_of(spec, (0.90, 0.99), (0.6, 0.7))

    chosen = {
        objective: [
            result.total_bits
            for result in allocate_bits(
                spec, slots, budget=300, options=AllocateOptions(objective=objective)
            ).choice.values()
        ]
        for objective in ("log", "sum")
    }

    assert chosen == {"log": [200, 100], "sum": [100, 200]}


def test_perfect_accuracy_has_a_finite_logarithm(spec: ModelSpec) -> None:
    options = AllocateOptions(objective="log")

    allocation = allocate_bits(spec, slots_of(spec, (1.0, 1.0)), budget=500, options=options)

    assert allocation.value == pytest.approx(math.log(1e-6))


def test_numel_is_that_of_the_decoder_with_padding_and_without_head(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path, head_dim=24, vocab_size=301))

    assert decoder_numel(spec) == 2 * (
        64 * 96
        + 2 * 64 * 64
        + 96 * 64  # q, k and v with 48 columns padded to 64, o
        + 3 * 64 * 96
    )


def test_nats_are_added_up_whatever_the_objective_for_errors(single: ModelSpec) -> None:
    slots = measured_in_nats(single).decoder
    budget = int(decoder_numel(single) * 4.2)

    found = [
        allocate_bits(single, slots, budget=budget, options=AllocateOptions(objective=objective))
        for objective in ("log", "sum", "power")
    ]

    assert {allocation.objective for allocation in found} == {"nats"}
    assert found[0].choice == found[1].choice == found[2].choice
    assert found[0].value == math.fsum(result.nats or 0 for result in found[0].choice.values())


def combinations(
    slots: Mapping[str, Results],
) -> list[tuple[int, float, dict[str, CandidateResult]]]:
    """Return bits, nats and choice of every possible allocation."""
    return [
        (
            sum(result.total_bits for result in results),
            math.fsum(result.nats or 0 for result in results),
            dict(zip(slots, results, strict=True)),
        )
        for results in itertools.product(*slots.values())
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_per_projection_is_that_of_brute_force(seed: int, single: ModelSpec) -> None:
    options = random.Random(seed).sample(PROJECTION_OPTIONS, 3)
    slots = measured_in_nats(single, options=options, seed=seed).decoder
    every = combinations(slots)
    sizes = sorted(bits for bits, _, _ in every)

    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0):
        budget = sizes[int(share * (len(sizes) - 1))]
        allocation = allocate_bits(single, slots, budget=budget, options=AllocateOptions())

        best = min(nats for bits, nats, _ in every if bits <= budget)
        assert allocation.value == pytest.approx(best, rel=EXACT)
        assert allocation.used_bits <= budget
        assert allocation.params == {
            p.key: allocation.choice[p.key].params[p.name] for p in decoder_projections(single)
        }


@pytest.mark.parametrize("seed", range(2))
def test_the_choice_for_a_total_is_that_of_brute_force(seed: int, single: ModelSpec) -> None:
    """The head is one slot among the others; headers count, and grow with the offsets in them."""
    measurement = measured_in_nats(single, options=SOME, head_options=HEAD_OPTIONS[::5], seed=seed)
    slots = {**measurement.decoder, single.head.key: measurement.head}
    every = [
        (output_bytes(single, params_of(single, choice), 0), nats)
        for _, nats, choice in combinations(slots)
    ]
    least, most = min(every)[0], max(every)[0]

    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        target = least + int(share * (most - least))
        allocation = allocate_total(
            config_for(single, target_bytes=target, shard_size_mb=0), single, measurement
        )
        choice = allocation.params

        best = min(nats for size, nats in every if size + HEADER_SLACK <= max(target, least + 64))
        assert output_bytes(single, choice, 0) <= target
        assert allocation.value <= best * (1 + EXACT)
        assert set(choice) == {*measurement.decoder, single.head.key}


def params_of(spec: ModelSpec, choice: Mapping[str, CandidateResult]) -> dict[str, QuantParams]:
    """Return projection key → parameters of a choice per projection."""
    everything = [*decoder_projections(spec), spec.head]
    return {p.key: choice[p.key].params[p.name] for p in everything}


def config_for(spec: ModelSpec, **values: object) -> ConversionConfig:
    return small_config(spec.source_dir, spec.source_dir.parent / "out", **values)


@pytest.fixture
def wide(tmp_path: Path) -> ModelSpec:
    """A model of 2.4 million weights, of which only the configuration is looked at."""
    shape = {"hidden_size": 256, "intermediate_size": 672, "vocab_size": 2003}
    return resolve(make_tiny("llama", tmp_path / "wide", **shape))


@pytest.mark.parametrize("share", [0.0, 0.07, 0.31, 0.55, 0.9, 1.0])
@pytest.mark.parametrize("shard_size_mb", [0, 1])
def test_a_total_is_kept_to_and_used_up(share: float, shard_size_mb: int, wide: ModelSpec) -> None:
    measurement = measured_in_nats(wide)
    low, high = (
        output_bytes(wide, extreme_choice(wide, measurement, pick), shard_size_mb)
        for pick in (min, max)
    )
    target = low + int(share * (high - low))

    allocation = allocate_total(
        config_for(wide, target_bytes=target, shard_size_mb=shard_size_mb), wide, measurement
    )
    choice = allocation.params

    size = output_bytes(wide, choice, shard_size_mb)
    assert size <= target
    assert size >= 0.999 * target
    assert choice[wide.head.key] in HEAD_OPTIONS
    assert allocation.used_bits == sum(
        projection_bits(p, choice[p.key]) for p in [*decoder_projections(wide), wide.head]
    )


def extreme_choice(
    spec: ModelSpec, measurement: Measurement, pick: Callable[..., CandidateResult]
) -> dict[str, QuantParams]:
    slots = {**measurement.decoder, spec.head.key: measurement.head}
    chosen = {k: pick(results, key=lambda r: r.total_bits) for k, results in slots.items()}
    return params_of(spec, chosen)


def test_the_solver_leaves_stdout_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints for some of these instances, below Python's own stdout."""
    spec = resolve(make_tiny("llama", tmp_path, num_hidden_layers=6))
    slots = measured_in_nats(spec).decoder

    for bpw in (3.9, 4.1, 4.3):
        budget = int(decoder_numel(spec) * bpw)
        allocate_bits(spec, slots, budget=budget, options=AllocateOptions())
    print("heard again")

    assert capfd.readouterr().out == "heard again\n"


def test_a_total_below_the_smallest_output_is_refused_with_its_size(wide: ModelSpec) -> None:
    measurement = measured_in_nats(wide)
    least = output_bytes(wide, extreme_choice(wide, measurement, min), 8192)

    with pytest.raises(BudgetUnreachable, match=f"the smallest output has about {least:,};"):
        allocate_total(config_for(wide, target_bytes=least - 1), wide, measurement)


def test_a_costly_head_gets_more_bits_than_a_cheap_one(wide: ModelSpec) -> None:
    measurement = measured_in_nats(wide)
    target = int(0.4 * 2 * sum(p.in_features * p.out_features for p in decoder_projections(wide)))

    widths = []
    for factor in (1e-3, 1e3):
        changed = replace(measurement, head=measurement.head.scaled(factor))
        config = config_for(wide, target_bytes=target + 2 * 2003 * 256)
        choice = allocate_total(config, wide, changed).params
        widths.append(projection_bits(wide.head, choice[wide.head.key]))

    assert widths[0] < widths[1]


def test_a_given_head_is_kept_with_a_total(wide: ModelSpec) -> None:
    config = config_for(wide, bpw_total=8, head_bits=8)

    allocation = allocate_total(config, wide, measured_in_nats(wide))

    choice = allocation.params
    assert choice[wide.head.key] == HEAD_PARAMS[8]
    assert wide.head.key not in allocation.choice
    assert output_bytes(wide, choice, config.shard_size_mb) <= total_target(config, wide)


def test_bits_per_weight_of_the_whole_count_every_weight(single: ModelSpec) -> None:
    norms, embedding, head = 3 * 64, 301 * 64, 301 * 64
    numel = decoder_numel(single) + norms + embedding + head

    assert total_target(config_for(single, bpw_total=5.5), single) == int(numel * 5.5 / 8)


@pytest.mark.parametrize("kind", ["sublayers", "projections"])
def test_a_free_head_that_was_not_measured_is_refused(kind: str, spec: ModelSpec) -> None:
    path = spec.source_dir.parent / "measurement.json"
    if kind == "sublayers":
        foreign_measurement(path, spec)
    else:
        written_in_nats(path, spec, head=False)
    measurement = read_measurement(path, spec)

    with pytest.raises(ConfigError, match="does not include the head") as refusal:
        allocate_total(config_for(spec, bpw_total=8), spec, measurement)

    assert "`--head-bits`" in str(refusal.value)
    assert "`--sensitivity fisher`" in str(refusal.value)
    allocation = allocate_total(config_for(spec, bpw_total=8, head_bits=6), spec, measurement)
    assert allocation.params[spec.head.key] == HEAD_PARAMS[6]


def staged(spec: ModelSpec, measurement: Path, **values: object) -> dict[str, Any]:
    """Run the stages up to `allocate` without factors; return what it stored, and the choice."""
    root = spec.source_dir.parent
    calibration = calibrated_on(text_parquet(root / "text.parquet"), (1, 32), (1, 32))
    config = config_for(
        spec,
        measurement=measurement,
        calibration=calibration,
        sensitivity={"kind": "error"},
        **values,
    )
    folder = run_until(config, "allocate").path("allocate")
    stored: dict[str, Any] = read_json(folder / ALLOCATION_FILE)
    return {**stored, "read": read_choice(folder)}


def test_stage_stores_choice_status_and_bound(spec: ModelSpec, tmp_path: Path) -> None:
    stored = staged(spec, foreign_measurement(tmp_path / "m.json", spec), bpw=4.5)

    assert stored["budget_bits"] == int(decoder_numel(spec) * 4.5)
    assert stored["used_bits"] == sum(entry["total_bits"] for entry in stored["choice"].values())
    assert stored["used_bits"] <= stored["budget_bits"]
    assert stored["bpw"] == stored["used_bits"] / decoder_numel(spec)
    assert "Optimal" in stored["status"]
    assert stored["bound"] <= stored["value"] * (1 + 1e-6)
    errors = [1 - entry["accuracy"] for entry in stored["choice"].values()]
    assert stored["worst_rel_err"] == max(errors)
    choice = stored["read"]
    assert list(choice) == [*(p.key for p in decoder_projections(spec)), spec.head.key]
    for sublayer in spec.sublayers:
        entry = stored["choice"][sublayer.name]
        candidate = {p.name: choice[p.key] for p in sublayer.projections}
        assert candidate_bits(sublayer.projections, candidate) == entry["total_bits"]
    assert choice[spec.head.key] == HEAD_PARAMS[6]


def test_stage_stores_parameters_of_every_projection_and_of_a_chosen_head(
    spec: ModelSpec, tmp_path: Path
) -> None:
    measurement = written_in_nats(tmp_path / "m.json", spec)

    by_bits = staged(spec, measurement, bpw=4.5)
    by_total = staged(spec, measurement, bpw_total=9)

    keys = [p.key for p in decoder_projections(spec)]
    assert list(by_bits["choice"]) == keys
    assert list(by_total["choice"]) == [*keys, spec.head.key]
    assert list(by_bits["read"]) == list(by_total["read"]) == [*keys, spec.head.key]
    assert {by_bits["objective"], by_total["objective"]} == {"nats"}
    json.dumps([by_bits["choice"], by_total["choice"]], allow_nan=False)
