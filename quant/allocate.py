"""Allot bits: choose one candidate per slot so that the objective is least within the budget.

An exact multiple-choice knapsack. Dominated candidates are dropped first, as none is part of an
optimum; HiGHS solves the rest to a zero gap; the chosen bits are summed again in integers.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from exl2flow.core.config import TARGETS, AllocateOptions, ConversionConfig
from exl2flow.core.errors import AllocationError, BudgetUnreachable, ConfigError
from exl2flow.core.files import digest, read_json, write_json
from exl2flow.core.stage import Stage, StageRun
from exl2flow.model import ModelSpec, ProjectionSpec, expected_tensors, resolve
from exl2flow.model.exl2 import QuantParams, padded_columns
from exl2flow.quant.candidates import HEAD_PARAMS
from exl2flow.quant.layout import Choice, output_bytes
from exl2flow.quant.measurement import (
    MEASUREMENT_FILE,
    CandidateResult,
    Measurement,
    Slots,
    read_measurement,
    slot_projections,
)

log = logging.getLogger(__name__)

ALLOCATION_FILE = "allocation.json"
LEAST_ERROR = 1e-6  # of the logarithmic objective; accuracies are stored no finer


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """choice: option index per slot; value: objective reached; bound: proven lower bound of it."""

    choice: tuple[int, ...]
    bits: int
    value: float
    bound: float
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The chosen candidate of every slot, under a budget in bits; params: by projection key."""

    budget_bits: int
    used_bits: int
    numel: int
    choice: Mapping[str, CandidateResult]
    params: Mapping[str, QuantParams]
    objective: str
    value: float
    bound: float
    status: str

    @property
    def bpw(self) -> float:
        """Bits per weight of the slots' matrices, overheads included."""
        return self.used_bits / self.numel

    def to_json(self) -> dict[str, object]:
        """Return the content of `allocation.json`, but the parameters."""
        return {
            "budget_bits": self.budget_bits,
            "used_bits": self.used_bits,
            "numel": self.numel,
            "bpw": self.bpw,
            "objective": self.objective,
            "value": self.value,
            "bound": self.bound,
            "status": self.status,
            "worst_rel_err": max(1 - result.accuracy for result in self.choice.values()),
            "choice": {name: result.to_json() for name, result in self.choice.items()},
        }


def solve(bits: Sequence[Sequence[int]], cost: Sequence[Sequence[float]], budget: int) -> Solution:
    """Choose one option per slot with the least total cost and total bits within the budget.

    Args:
        bits: exact bits of each option of each slot.
        cost: cost of the same options; any finite numbers.
        budget: total bits permitted.

    Raises:
        BudgetUnreachable: even the smallest options exceed the budget.
        AllocationError: the solver found no proven optimum.
    """
    least = sum(min(options) for options in bits)
    if least > budget:
        raise BudgetUnreachable(f"the smallest options need {least} bits, the budget is {budget}")
    fronts = [_pareto(b, c) for b, c in zip(bits, cost, strict=True)]
    choice, bound, status = _solve_milp(bits, cost, fronts, budget)
    return Solution(
        choice=choice,
        bits=sum(b[i] for b, i in zip(bits, choice, strict=True)),
        value=math.fsum(c[i] for c, i in zip(cost, choice, strict=True)),
        bound=bound,
        status=status,
    )


def _pareto(bits: Sequence[int], cost: Sequence[float]) -> list[int]:
    """Return the options that no other option equals or beats in both bits and cost."""
    front: list[int] = []
    for index in sorted(range(len(bits)), key=lambda i: (bits[i], cost[i], i)):
        if not front or cost[index] < cost[front[-1]]:
            front.append(index)
    return front


def _solve_milp(
    bits: Sequence[Sequence[int]],
    cost: Sequence[Sequence[float]],
    fronts: Sequence[Sequence[int]],
    budget: int,
) -> tuple[tuple[int, ...], float, str]:
    """Solve with HiGHS; a capacity that its tolerances overstep is tightened and solved again.

    Bits are counted above each slot's smallest option in units of their common divisor and costs
    relative to the spread, so that HiGHS's absolute tolerances (1e-6) are far below one unit.
    """
    base = sum(b[f[0]] for b, f in zip(bits, fronts, strict=True))
    extra = [b[i] - b[f[0]] for b, f in zip(bits, fronts, strict=True) for i in f]
    unit = math.gcd(*extra) or 1
    floor = math.fsum(c[f[-1]] for c, f in zip(cost, fronts, strict=True))
    above = np.array([c[i] - c[f[-1]] for c, f in zip(cost, fronts, strict=True) for i in f])
    scale = 1e4 / above.max() if above.max() > 0 else 1.0
    slot = [s for s, f in enumerate(fronts) for _ in f]
    option = [i for f in fronts for i in f]
    one_each = csr_matrix(
        (np.ones(len(slot)), (slot, np.arange(len(slot)))), shape=(len(fronts), len(slot))
    )
    weights = np.array([e // unit for e in extra], dtype=float)
    capacity = (budget - base) // unit
    while True:
        result = milp(
            above * scale,
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(weights[None, :], -np.inf, float(capacity)),
            ],
            bounds=Bounds(0, 1),
            integrality=np.ones(len(slot), dtype=np.int64),
            options={"mip_rel_gap": 0.0},
        )
        if result.status != 0:
            raise AllocationError(f"bit allocation found no proven optimum: {result.message}")
        picked = np.flatnonzero(result.x > 0.5)
        choice = tuple(option[i] for i in picked)
        if base + sum(extra[i] for i in picked) <= budget:
            bound = floor + float(result.mip_dual_bound) / scale
            return choice, bound, str(result.message).strip()
        capacity -= 1


def allocate_bits(
    spec: ModelSpec, slots: Slots, *, budget: int, options: AllocateOptions
) -> Allocation:
    """Choose a candidate per slot.

    Args:
        spec: the model.
        slots: slot → measured candidates.
        budget: bits permitted for all slots together.
        options: the objective of slots whose cost in nats is not known.

    Raises:
        BudgetUnreachable: naming the reachable range in bits per weight.
    """
    bits = [[result.total_bits for result in results] for results in slots.values()]
    cost = [[_cost(result, options) for result in results] for results in slots.values()]
    projections = slot_projections(spec)
    numel = sum(_numel(p) for name in slots for p in projections[name])
    try:
        solution = solve(bits, cost, budget)
    except BudgetUnreachable as error:
        low, high = (sum(map(extreme, bits)) / numel for extreme in (min, max))
        raise BudgetUnreachable(
            f"{budget / numel:.3f} bits per weight are out of reach: this model's candidates span "
            f"{low:.3f} to {high:.3f}; ask for at least {math.ceil(low * 100) / 100:.2f} "
            "with `--bpw`"
        ) from error
    choice = {
        name: results[index]
        for (name, results), index in zip(slots.items(), solution.choice, strict=True)
    }
    return Allocation(
        budget_bits=budget,
        used_bits=solution.bits,
        numel=numel,
        choice=choice,
        params=_projection_params(spec, choice),
        objective=_objective(slots, options),
        value=solution.value,
        bound=solution.bound,
        status=solution.status,
    )


def _objective(slots: Slots, options: AllocateOptions) -> str:
    if all(result.nats is not None for results in slots.values() for result in results):
        return "nats"
    return options.objective + (f" {options.power:g}" if options.objective == "power" else "")


def _cost(result: CandidateResult, options: AllocateOptions) -> float:
    if result.nats is not None:
        return result.nats
    error = max(LEAST_ERROR, 1 - result.accuracy)
    match options.objective:
        case "log":
            return math.log(error)
        case "sum":
            return error
        case "power":
            return float(error**options.power)


def _numel(projection: ProjectionSpec) -> int:
    return projection.in_features * padded_columns(projection.out_features)


def decoder_numel(spec: ModelSpec) -> int:
    """Return the weights of the decoder's matrices, padding included."""
    return sum(_numel(p) for sublayer in spec.sublayers for p in sublayer.projections)


def read_choice(folder: Path) -> dict[str, QuantParams]:
    """Return projection key → chosen parameters from the stage folder of `allocate`."""
    params = read_json(folder / ALLOCATION_FILE)["params"]
    return {key: QuantParams.from_json(value) for key, value in params.items()}


def allocate(run: StageRun) -> None:
    """Write `allocation.json` for the target into the stage folder."""
    config = run.config
    spec = resolve(config.source)
    given = config.measurement
    path = given if given is not None else run.inputs["measure"] / MEASUREMENT_FILE
    measurement = read_measurement(path, spec)
    if config.bpw is not None:
        assert config.fixed_head_bits is not None
        budget = int(decoder_numel(spec) * config.bpw)
        allocation = allocate_bits(
            spec, measurement.decoder, budget=budget, options=config.allocate
        )
        choice: Choice = {**allocation.params, spec.head.key: HEAD_PARAMS[config.fixed_head_bits]}
    else:
        allocation, choice = allocate_total(config, spec, measurement)
    log.info("bpw=%.4f objective=%s %s", allocation.bpw, allocation.value, allocation.status)
    params = {key: value.to_json() for key, value in choice.items()}
    content = {**allocation.to_json(), "params": params}
    write_json(run.folder.path / ALLOCATION_FILE, content)
    run.folder.commit(ALLOCATION_FILE, digest(run.folder.path / ALLOCATION_FILE), cursor=1)
    run.tick(1, 1, f"bpw={allocation.bpw:.4f}")


def allocate_total(
    config: ConversionConfig, spec: ModelSpec, measurement: Measurement
) -> tuple[Allocation, Choice]:
    """Allot bits so that all output files of weights together keep to the target.

    Raises:
        ConfigError: the head is free but was not measured.
        BudgetUnreachable: naming the least size.
    """
    slots = dict(measurement.decoder)
    fixed: dict[str, QuantParams] = {}
    if config.fixed_head_bits is not None:
        fixed[spec.head.key] = HEAD_PARAMS[config.fixed_head_bits]
    elif measurement.head:
        slots[spec.head.key] = measurement.head
    else:
        raise ConfigError(
            "the measurement knows nothing of the head, whose bits are to be chosen; give "
            "`--head-bits`, or measure with `--sensitivity fisher`"
        )
    target = total_target(config, spec)
    least = {name: min(results, key=_bits) for name, results in slots.items()}
    choice: Choice = _projection_params(spec, least) | fixed
    size = output_bytes(spec, choice, config.shard_size_mb)
    overhead = size * 8 - sum(map(_bits, least.values()))  # headers grow by a few digits at most
    if size > target:
        raise BudgetUnreachable(
            f"the smallest output has {size:,} bytes, the target is {target:,}; raise the target"
        )
    while True:
        allocation = allocate_bits(
            spec, slots, budget=target * 8 - overhead, options=config.allocate
        )
        choice = {**allocation.params, **fixed}
        excess = output_bytes(spec, choice, config.shard_size_mb) - target
        if excess <= 0:
            return allocation, choice
        overhead += 8 * excess


def total_target(config: ConversionConfig, spec: ModelSpec) -> int:
    """Return the target in bytes when it is a total."""
    if config.target_bytes is not None:
        return config.target_bytes
    assert config.bpw_total is not None
    weights = sum(torch.Size(shape).numel() for shape in expected_tensors(spec).values())
    return int(weights * config.bpw_total / 8)


def _bits(result: CandidateResult) -> int:
    return result.total_bits


def _projection_params(
    spec: ModelSpec, chosen: Mapping[str, CandidateResult]
) -> dict[str, QuantParams]:
    """Return projection key → parameters of a choice per slot."""
    projections = slot_projections(spec)
    return {
        p.key: result.params[p.name] for name, result in chosen.items() for p in projections[name]
    }


def _options(config: ConversionConfig) -> dict[str, object]:
    return {
        "target": {name: getattr(config, name) for name in TARGETS},
        "head_bits": config.fixed_head_bits,
        "shard_size_mb": config.shard_size_mb if config.bpw is None else None,
        "allocate": config.allocate.model_dump(),
        "measurement": digest(config.measurement) if config.measurement else None,
    }


ALLOCATE = Stage(name="allocate", schema=2, inputs=("measure",), options=_options, run=allocate)
