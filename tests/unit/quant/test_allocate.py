"""Bit allocation: exact, within the budget, refused when out of reach; measurements it reads."""

import itertools
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config
from stage_runs import foreign_measurement, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.config import AllocateOptions
from exl2flow.core.errors import BudgetUnreachable, ConfigError, CorruptCheckpoint
from exl2flow.core.files import read_json
from exl2flow.model import ModelSpec, resolve
from exl2flow.quant.allocate import (
    ALLOCATION_FILE,
    allocate_bits,
    decoder_numel,
    read_choice,
    read_measurement,
    solve,
)
from exl2flow.quant.candidates import CANDIDATES
from exl2flow.quant.measure import CandidateResult, candidate_bits

ANNEALER_SECONDS = 2.5  # for each of its instances
RELATIVE = 1e-9  # sums of doubles in another order
Table = list[list[int]]
Costs = list[list[float]]


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return resolve(make_tiny("llama", tmp_path / "model"))


@pytest.fixture
def measurement(tmp_path: Path, spec: ModelSpec) -> Path:
    return foreign_measurement(tmp_path / "measurement.json", spec)


def small_instance(rng: random.Random) -> tuple[Table, Costs, int]:
    """Return bits, costs and a budget; sizes and shapes vary, ties and dominated options occur."""
    unit = rng.choice([1, 32, 1000, 2**20])
    slots = rng.randint(1, 6)
    bits = [[unit * rng.randint(1, 60) for _ in range(rng.randint(1, 5))] for _ in range(slots)]
    costs = [[rng.choice([rng.random(), 0.25]) ** 2 for _ in options] for options in bits]
    low, high = sum(map(min, bits)), sum(map(max, bits))
    return bits, costs, rng.randint(low, high + unit)


def brute_force(bits: Table, costs: Costs, budget: int) -> float:
    return min(
        math.fsum(c[i] for c, i in zip(costs, choice, strict=True))
        for choice in itertools.product(*(range(len(options)) for options in bits))
        if sum(b[i] for b, i in zip(bits, choice, strict=True)) <= budget
    )


def decoder_instance(rng: random.Random, *, layers: int, bpw: float) -> tuple[Table, Costs, int]:
    """Return the slots of a decoder with hidden size 4096, errors falling with the bits."""
    shapes = {
        "attention": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (4096, 4096)),
        "mlp": {
            "gate_proj": (4096, 11008),
            "up_proj": (4096, 11008),
            "down_proj": (11008, 4096),
        },
    }
    bits: Table = []
    costs: Costs = []
    numel = 0
    for _ in range(layers):
        for kind, projections in shapes.items():
            size = sum(k * n for k, n in projections.values())
            weight = rng.uniform(0.02, 0.5)
            bits.append(
                [
                    sum(row[p].total_bits(k, n) for p, (k, n) in projections.items())
                    for row in CANDIDATES[kind]
                ]
            )
            errors = [weight * 2 ** (1 - b / size) * rng.uniform(0.9, 1.1) for b in bits[-1]]
            costs.append([error**2 for error in errors])
            numel += size
    return bits, costs, int(numel * bpw)


def anneal(bits: Table, costs: Costs, budget: int, rng: random.Random) -> float:
    """Anneal from the first options for a few seconds; return the least cost that was met."""
    choice = [0] * len(bits)
    used, value = sum(b[0] for b in bits), sum(c[0] for c in costs)
    best = value
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < ANNEALER_SECONDS:
        temperature = value / len(bits) * 10 ** (-5 * elapsed / ANNEALER_SECONDS)
        for _ in range(1000):
            slot = rng.randrange(len(bits))
            option = rng.randrange(len(bits[slot]))
            more = bits[slot][option] - bits[slot][choice[slot]]
            worse = costs[slot][option] - costs[slot][choice[slot]]
            if used + more <= budget and (
                worse < 0 or rng.random() < math.exp(-worse / temperature)
            ):
                choice[slot], used, value = option, used + more, value + worse
                best = min(best, value)
    return best


def test_value_is_that_of_brute_force_on_200_instances() -> None:
    rng = random.Random(0)
    for number in range(200):
        bits, costs, budget = small_instance(rng)

        solution = solve(bits, costs, budget)

        assert solution.value == pytest.approx(
            brute_force(bits, costs, budget), rel=RELATIVE, abs=1e-12
        ), f"instance {number}"
        assert solution.bits == sum(b[i] for b, i in zip(bits, solution.choice, strict=True))
        assert solution.bits <= budget


@pytest.mark.parametrize(("layers", "bpw"), [(32, 4.0), (32, 2.5), (80, 3.0), (16, 6.0)], ids=str)
def test_annealer_never_finds_anything_better(layers: int, bpw: float) -> None:
    rng = random.Random(layers)
    bits, costs, budget = decoder_instance(rng, layers=layers, bpw=bpw)

    solution = solve(bits, costs, budget)

    assert solution.bits <= budget
    assert solution.value <= anneal(bits, costs, budget, rng) * (1 + RELATIVE)


def test_optimum_is_proven() -> None:
    bits, costs, budget = decoder_instance(random.Random(1), layers=8, bpw=4.0)

    solution = solve(bits, costs, budget)

    assert "Optimal" in solution.status
    # HiGHS works on costs scaled to a spread of 10^4, with tolerances of 1e-6
    assert solution.bound == pytest.approx(solution.value, rel=1e-6)


def test_exact_budget_is_used_up() -> None:
    bits = [[3, 5, 9], [2, 4, 8]]
    costs = [[1.0, 0.5, 0.1], [1.0, 0.6, 0.2]]

    for budget in range(5, 18):
        assert solve(bits, costs, budget).value == pytest.approx(brute_force(bits, costs, budget))


def test_large_sums_are_exact_to_the_bit() -> None:
    """Options differ by a bit in 2^40: no tolerance of doubles may overstep the budget."""
    bits = [[2**40, 2**40 + 1], [2**40, 2**40 + 3]]
    costs = [[1.0, 0.0], [1.0, 0.5]]

    assert solve(bits, costs, 2**41).choice == (0, 0)
    assert solve(bits, costs, 2**41 + 2).choice == (1, 0)
    assert solve(bits, costs, 2**41 + 3).choice == (1, 0)
    assert solve(bits, costs, 2**41 + 4).choice == (1, 1)


def test_ample_budget_takes_the_least_errors_everywhere() -> None:
    bits, costs, _ = decoder_instance(random.Random(2), layers=4, bpw=4.0)

    solution = solve(bits, costs, 10**15)

    assert [c[i] for c, i in zip(costs, solution.choice, strict=True)] == [min(c) for c in costs]


def test_budget_below_the_smallest_options_is_refused() -> None:
    with pytest.raises(BudgetUnreachable, match="need 7 bits, the budget is 6"):
        solve([[3, 5], [4, 9]], [[1.0, 0.5], [1.0, 0.5]], 6)


def results(*entries: tuple[int, float]) -> list[CandidateResult]:
    return [CandidateResult(accuracy=a, total_bits=b, params={}) for b, a in entries]


def test_refusal_names_the_reachable_range() -> None:
    slots = {"a": results((300, 0.5), (800, 0.9)), "b": results((250, 0.5), (600, 0.9))}

    with pytest.raises(
        BudgetUnreachable, match=r"2\.000 bits .* span 5\.500 to 14\.000; .* at least 5\.50"
    ):
        allocate_bits(slots, budget=200, numel=100, options=AllocateOptions())


@pytest.mark.parametrize(
    ("objective", "power", "value"),
    [
        ("sum", 2.0, 0.1 + 0.3),
        ("power", 2.0, 0.1**2 + 0.3**2),
        ("power", 3.5, 0.1**3.5 + 0.3**3.5),
        ("log", 2.0, math.log(0.1) + math.log(0.3)),
    ],
)
def test_objective_is_what_its_name_says(objective: str, power: float, value: float) -> None:
    slots = {"a": results((300, 0.9)), "b": results((250, 0.7))}
    options = AllocateOptions(objective=objective, power=power)

    allocation = allocate_bits(slots, budget=600, numel=100, options=options)

    assert allocation.value == pytest.approx(value)
    assert allocation.objective == (f"power {power:g}" if objective == "power" else objective)


def test_objective_decides_between_equal_bits() -> None:
    slots = {"a": results((1, 0.90), (2, 0.99)), "b": results((1, 0.6), (2, 0.7))}

    chosen = {
        objective: [
            result.total_bits
            for result in allocate_bits(
                slots, budget=3, numel=4, options=AllocateOptions(objective=objective)
            ).choice.values()
        ]
        for objective in ("log", "sum")
    }

    assert chosen == {"log": [2, 1], "sum": [1, 2]}


def test_perfect_accuracy_has_a_finite_logarithm() -> None:
    slots = {"a": results((1, 1.0), (2, 1.0))}

    allocation = allocate_bits(slots, budget=5, numel=1, options=AllocateOptions(objective="log"))

    assert allocation.value == pytest.approx(math.log(1e-6))


def test_numel_is_that_of_the_decoder_with_padding_and_without_head(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path, head_dim=24, vocab_size=301))

    assert decoder_numel(spec) == 2 * (
        64 * 96
        + 2 * 64 * 64
        + 96 * 64  # q, k and v with 48 columns padded to 64, o
        + 3 * 64 * 96
    )


def test_foreign_measurement_loads(measurement: Path, spec: ModelSpec) -> None:
    slots = read_measurement(measurement, spec)

    assert list(slots) == [sublayer.name for sublayer in spec.sublayers]
    assert [len(options) for options in slots.values()] == [19, 17, 19, 17]
    text = json.loads(measurement.read_text())["measurement"]
    first = text["model.layers.0.self_attn"][0]
    assert first["q_proj"]["group_size"] == {"3": 64, "2": 64}
    assert text["lm_head.linear"] is None
    found = slots["model.layers.0.self_attn"][0]
    assert found.params["q_proj"].group_sizes == (64, 64)
    assert (found.accuracy, found.total_bits) == (first["accuracy"], first["total_bits"])


def altered(measurement: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(measurement.read_text())
    change(content)
    measurement.write_text(json.dumps(content))
    return measurement


ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("last_module_idx"), "last_module_idx"),
        (lambda c: c.pop("measurement"), "measurement"),
        (lambda c: c["measurement"].pop(ATTENTION), ATTENTION),
        (lambda c: c["measurement"].update({ATTENTION: None}), "not a measurement"),
        (lambda c: c["measurement"].update({ATTENTION: []}), ATTENTION),
        (lambda c: c["measurement"][ATTENTION][3].pop("accuracy"), "accuracy"),
        (lambda c: c["measurement"][ATTENTION][3].update(accuracy=math.nan), "accuracy"),
        (lambda c: c["measurement"][ATTENTION][3].update(accuracy=1.5), "accuracy"),
        (lambda c: c["measurement"][ATTENTION][3].pop("k_proj"), "lists"),
        (lambda c: c["measurement"][ATTENTION][3]["k_proj"].pop("bits"), "bits"),
        (lambda c: c["measurement"][ATTENTION][3].update(total_bits=7), "states 7 bits"),
    ],
)
def test_damaged_measurement_is_refused_by_name(
    change: Callable[[dict[str, Any]], object], message: str, measurement: Path, spec: ModelSpec
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_measurement(altered(measurement, change), spec)


@pytest.mark.parametrize("content", ["[]", '"text"', "7"])
def test_other_json_is_refused(content: str, measurement: Path, spec: ModelSpec) -> None:
    measurement.write_text(content)

    with pytest.raises(ConfigError, match="not a measurement"):
        read_measurement(measurement, spec)


def test_unreadable_file_is_refused(measurement: Path, spec: ModelSpec) -> None:
    measurement.write_text("{")

    with pytest.raises(CorruptCheckpoint, match=r"measurement\.json"):
        read_measurement(measurement, spec)


def test_measurement_of_another_model_is_refused(
    measurement: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    other = resolve(make_tiny("llama", tmp_path / "other", intermediate_size=128))

    with pytest.raises(ConfigError, match=r"it is of another model"):
        read_measurement(measurement, other)


def test_bits_of_a_sublayer_count_padding_and_biases(tmp_path: Path) -> None:
    spec = resolve(make_tiny("qwen2", tmp_path, head_dim=24))
    attention = spec.sublayers[0]
    candidate = CANDIDATES["attention"][4]

    bits = candidate_bits(attention, candidate)

    q, k, v, o = (candidate[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    assert bits == (
        q.total_bits(64, 96, has_bias=True)
        + k.total_bits(64, 64, has_bias=True)
        + v.total_bits(64, 64, has_bias=True)
        + o.total_bits(96, 64)
    )


def test_stage_stores_choice_status_and_bound(measurement: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    calibration = {
        "text": text_parquet(tmp_path / "text.parquet"),
        "rows": 1,
        "row_tokens": 32,
        "measure_rows": 1,
        "measure_row_tokens": 32,
    }
    config = small_config(
        source, tmp_path / "out", bpw=4.5, measurement=measurement, calibration=calibration
    )

    folder = run_until(config, "allocate").path("allocate")

    stored = read_json(folder / ALLOCATION_FILE)
    spec = resolve(source)
    assert stored["budget_bits"] == int(decoder_numel(spec) * 4.5)
    assert stored["used_bits"] == sum(entry["total_bits"] for entry in stored["choice"].values())
    assert stored["used_bits"] <= stored["budget_bits"]
    assert stored["bpw"] == stored["used_bits"] / decoder_numel(spec)
    assert "Optimal" in stored["status"]
    assert stored["bound"] <= stored["value"] * (1 + 1e-6)
    errors = [1 - entry["accuracy"] for entry in stored["choice"].values()]
    assert stored["worst_rel_err"] == max(errors)
    choice = read_choice(folder)
    assert list(choice) == [sublayer.name for sublayer in spec.sublayers]
    for sublayer in spec.sublayers:
        entry = stored["choice"][sublayer.name]
        assert candidate_bits(sublayer, choice[sublayer.name]) == entry["total_bits"]
