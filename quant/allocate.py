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
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from exl2flow.core.config import AllocateOptions, ConversionConfig
from exl2flow.core.errors import AllocationError, BudgetUnreachable, ConfigError
from exl2flow.core.files import digest, read_json, write_json
from exl2flow.core.stage import Stage, StageRun
from exl2flow.model import ModelSpec, SublayerSpec, resolve
from exl2flow.model.exl2 import QuantParams, padded_columns
from exl2flow.quant.candidates import Candidate
from exl2flow.quant.measure import MEASUREMENT_FILE, CandidateResult, candidate_bits

log = logging.getLogger(__name__)

ALLOCATION_FILE = "allocation.json"
LEAST_ERROR = 1e-6  # of the logarithmic objective; accuracies are stored no finer
Slots = Mapping[str, Sequence[CandidateResult]]


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
    """The chosen candidate of every sublayer, under a budget in bits."""

    budget_bits: int
    used_bits: int
    numel: int
    choice: Mapping[str, CandidateResult]
    objective: str
    value: float
    bound: float
    status: str

    @property
    def bpw(self) -> float:
        """Bits per weight of the decoder's matrices, overheads included."""
        return self.used_bits / self.numel

    def to_json(self) -> dict[str, object]:
        """Return the content of `allocation.json`."""
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


def allocate_bits(slots: Slots, *, budget: int, numel: int, options: AllocateOptions) -> Allocation:
    """Choose a candidate per slot.

    Args:
        slots: sublayer name → measured candidates.
        budget: bits permitted for all slots together.
        numel: weights that the bits are spread over.
        options: the objective.

    Raises:
        BudgetUnreachable: naming the reachable range in bits per weight.
    """
    bits = [[result.total_bits for result in results] for results in slots.values()]
    cost = [[_cost(result, options) for result in results] for results in slots.values()]
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
    objective = options.objective + (f" {options.power:g}" if options.objective == "power" else "")
    return Allocation(
        budget_bits=budget,
        used_bits=solution.bits,
        numel=numel,
        choice=choice,
        objective=objective,
        value=solution.value,
        bound=solution.bound,
        status=solution.status,
    )


def _cost(result: CandidateResult, options: AllocateOptions) -> float:
    error = max(LEAST_ERROR, 1 - result.accuracy)
    match options.objective:
        case "log":
            return math.log(error)
        case "sum":
            return error
        case "power":
            return float(error**options.power)


def decoder_numel(spec: ModelSpec) -> int:
    """Return the weights of the decoder's matrices, padding included."""
    return sum(
        p.in_features * padded_columns(p.out_features)
        for sublayer in spec.sublayers
        for p in sublayer.projections
    )


def read_measurement(path: Path, spec: ModelSpec) -> dict[str, list[CandidateResult]]:
    """Read a `measurement.json`, ours or exllamav2's, for this model.

    Bits are computed from the parameters; a file that states others belongs to another model.

    Raises:
        ConfigError: the file is not a measurement, or not of this model.
    """
    try:
        data = read_json(path)
        data["last_module_idx"]
        measured = data["measurement"]
        slots = {
            sublayer.name: [CandidateResult.from_json(entry) for entry in measured[sublayer.name]]
            for sublayer in spec.sublayers
        }
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"`{path}` is not a measurement of `{spec.source_dir}`: {error}; "
            "measure again or give the file that belongs to this model"
        ) from error
    for sublayer in spec.sublayers:
        _check_entries(path, sublayer, slots[sublayer.name])
    return slots


def _check_entries(path: Path, sublayer: SublayerSpec, results: Sequence[CandidateResult]) -> None:
    """Ask that measured candidates can be those of a sublayer.

    Raises:
        ConfigError: naming file and sublayer.
    """
    if not results:
        raise ConfigError(f"`{path}`: `{sublayer.name}` lists no candidates; measure again")
    for result in results:
        names = {projection.name for projection in sublayer.projections}
        if set(result.params) != names:
            raise ConfigError(f"`{path}`: `{sublayer.name}` lists {sorted(result.params)}")
        if not 0 <= result.accuracy <= 1:
            raise ConfigError(
                f"`{path}`: `{sublayer.name}` has an accuracy of {result.accuracy}, which is not "
                "between 0 and 1; measure again"
            )
        if candidate_bits(sublayer, result.params) != result.total_bits:
            raise ConfigError(
                f"`{path}` states {result.total_bits} bits for `{sublayer.name}`, this model "
                f"has {candidate_bits(sublayer, result.params)}; it is of another model"
            )


def read_choice(folder: Path) -> dict[str, Candidate]:
    """Return sublayer name → chosen parameters from the stage folder of `allocate`."""
    choice = read_json(folder / ALLOCATION_FILE)["choice"]
    return {
        name: {k: QuantParams.from_json(v) for k, v in entry.items() if isinstance(v, dict)}
        for name, entry in choice.items()
    }


def allocate(run: StageRun) -> None:
    """Write `allocation.json` for the target bits per weight into the stage folder."""
    spec = resolve(run.config.source)
    given = run.config.measurement
    path = given if given is not None else run.inputs["measure"] / MEASUREMENT_FILE
    slots = read_measurement(path, spec)
    numel = decoder_numel(spec)
    allocation = allocate_bits(
        slots, budget=int(numel * run.config.bpw), numel=numel, options=run.config.allocate
    )
    log.info("bpw=%.4f objective=%s %s", allocation.bpw, allocation.value, allocation.status)
    write_json(run.folder.path / ALLOCATION_FILE, allocation.to_json())
    run.folder.commit(ALLOCATION_FILE, digest(run.folder.path / ALLOCATION_FILE), cursor=1)
    run.tick(1, 1, f"bpw={allocation.bpw:.4f}")


def _options(config: ConversionConfig) -> dict[str, object]:
    return {
        "bpw": config.bpw,
        "allocate": config.allocate.model_dump(),
        "measurement": digest(config.measurement) if config.measurement else None,
    }


ALLOCATE = Stage(name="allocate", schema=1, inputs=("measure",), options=_options, run=allocate)
