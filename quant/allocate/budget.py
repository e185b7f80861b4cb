"""Allocate bits: choose one candidate per slot that minimizes the objective within the budget.

Costs of matrices are summed as if they were independent; `stage.py` corrects for interactions.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from exl2flow.core.errors import BudgetUnreachable, ConfigError
from exl2flow.core.options.config import AllocateOptions, ConversionConfig, Preference, RunOptions
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import NATS
from exl2flow.model import ModelSpec, expected_tensors
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.allocate.block import block_bytes, stored_spec
from exl2flow.quant.allocate.groups import grouped
from exl2flow.quant.allocate.knapsack import MOST_EXACT, solve
from exl2flow.quant.allocate.layout import carried_bytes, output_bytes
from exl2flow.quant.measure.candidates import FAST_GROUP, HEAD_PARAMS, is_allowed
from exl2flow.quant.measure.measurement import (
    CandidateResult,
    Measurement,
    read_measurement,
    slot_projections,
)
from exl2flow.quant.measure.results import Candidate, Results, Slots
from exl2flow.quant.walk.working_memory import stored_elements

ALLOCATION_FILE = "allocation.json"
LEAST_ERROR = 1e-6  # for the logarithm; accuracies are stored no finer


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The chosen candidate of every slot, under a budget in bits.

    params: by key of every projection, including the head, even if its bits are fixed.
    """

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
        """Return the content of `allocation.json` without the parameters."""
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


def allocate_bits(
    spec: ModelSpec, slots: Slots, *, budget: int, options: AllocateOptions
) -> Allocation:
    """Choose a candidate per slot.

    Args:
        spec: the model.
        slots: slot → measured candidates.
        budget: bits permitted for all slots together.
        options: the objective for slots without a cost in nats; whether experts choose together.

    Raises:
        BudgetUnreachable: naming the reachable range in bits per weight.
        ConfigError: experts of a layer are to be alike, but were not measured alike.
    """
    groups = grouped(spec, slots, options.experts)
    bits, cost = [], []
    for group in groups:
        members = [slots[name] for name in group.slots]
        bits.append(group.sums([results.bits.tolist() for results in members]))
        cost.append(group.sums([_costs(results, options) for results in members]))
    projections = slot_projections(spec)
    numel = sum(stored_elements(p) for name in slots for p in projections[name])
    try:
        solution = solve(bits, cost, budget)
    except BudgetUnreachable as error:
        low, high = (sum(map(extreme, bits)) / numel for extreme in (min, max))
        raise bitrate_unreachable(budget / numel, low, high, options) from error
    places: dict[str, int] = {}
    for group, index in zip(groups, solution.choice, strict=True):
        places |= group.chosen(index)
    choice = {name: results[places[name]] for name, results in slots.items()}
    return Allocation(
        budget_bits=budget,
        used_bits=solution.bits,
        numel=numel,
        choice=choice,
        params=projection_params(spec, choice),
        objective=_objective(slots, options),
        value=solution.value,
        bound=solution.bound,
        status=solution.status,
    )


def bitrate_unreachable(
    bpw: float, low: float, high: float, options: AllocateOptions
) -> BudgetUnreachable:
    """Return the error of a bitrate below the range from low to high that candidates reach."""
    return BudgetUnreachable(
        f"{bpw:.4g} bits per weight are out of reach: this model's candidates span {low:.3f} to "
        f"{high:.3f}; ask for at least {math.ceil(low * 100) / 100:.2f} with `--bpw`"
        + _other_remedy(options)
    )


def size_unreachable(target: int, least: int, options: AllocateOptions) -> BudgetUnreachable:
    """Return the error of a target in bytes below the smallest output."""
    return BudgetUnreachable(
        f"a total of {target:,} bytes is out of reach: the smallest output has about {least:,}; "
        "raise the target" + _other_remedy(options)
    )


def _other_remedy(options: AllocateOptions) -> str:
    return " or leave out `--prefer speed`" if options.prefer == "speed" else ""


def _objective(slots: Slots, options: AllocateOptions) -> str:
    if is_in_nats(slots):
        return NATS
    return options.objective + (f" {options.power:g}" if options.objective == "power" else "")


def is_in_nats(slots: Slots) -> bool:
    """Return whether all candidates have costs in nats."""
    return all(results.nats is not None for results in slots.values())


def _costs(results: Results, options: AllocateOptions) -> list[float]:
    """Return the costs of a slot's candidates, in nats if they are known."""
    if results.nats is None:
        return [_cost(accuracy, options) for accuracy in results.accuracy.tolist()]
    return list(results.nats.tolist())


def _cost(accuracy: float, options: AllocateOptions) -> float:
    error = max(LEAST_ERROR, 1 - accuracy)
    match options.objective:
        case "log":
            return math.log(error)
        case "sum":
            return error
        case "power":
            return float(error**options.power)


def decoder_numel(spec: ModelSpec) -> int:
    """Return the number of weights in the decoder's matrices, padding included."""
    return sum(map(stored_elements, spec.projections))


def read_choice(folder: Path) -> dict[str, QuantParams]:
    """Return projection key → chosen parameters from the stage folder of `allocate`."""
    params = read_json(folder / ALLOCATION_FILE)["params"]
    return {key: QuantParams.from_json(value) for key, value in params.items()}


def check_measured(config: RunOptions, measurement: Measurement | None) -> None:
    """Check that a measurement has the head and costs in nats if this allocation needs them.

    None is the measurement that this conversion will make.

    Raises:
        ConfigError: naming what is missing.
    """
    in_nats = with_head = config.sensitivity.kind == "fisher"
    if measurement is not None:
        in_nats = in_nats and is_in_nats(measurement.decoder)
        with_head = bool(measurement.head)
    if config.fixed_head_bits is None and not with_head:
        raise ConfigError(
            "the measurement does not include the head, whose bits are to be chosen; give "
            "`--head-bits`, or measure with `--sensitivity fisher`"
        )
    if config.allocation.rounds and not in_nats:
        raise ConfigError(
            "further rounds of allocation need costs in nats; use `--sensitivity fisher` and a "
            "measurement made with it, or another `--quality`"
        )


def read_candidates(config: RunOptions, spec: ModelSpec, path: Path) -> Measurement:
    """Read a measurement, without the candidates that the preference excludes.

    Raises:
        ConfigError: it is not a measurement of the model; or speed is preferred, and a slot has no
            candidate with all its groups of `FAST_GROUP` rows.
    """
    measurement = read_measurement(path, spec)
    decoder = allowed(measurement.decoder, config.allocation.prefer)
    if lacking := [name for name, results in decoder.items() if not results]:
        raise ConfigError(
            f"`{path}`: `{lacking[0]}` lists no candidates in groups of {FAST_GROUP} rows; leave "
            "out `--prefer speed` or `--measurement`"
        )
    return replace(measurement, decoder=decoder)


def allowed(slots: Slots, prefer: Preference) -> Slots:
    """Return the results without what a preference excludes."""
    known: dict[int, tuple[list[int], tuple[Candidate, ...]]] = {}  # by identity of all candidates

    def kept(results: Results) -> Results:
        listed = results.candidates
        if id(listed) not in known:
            places = [i for i, c in enumerate(listed) if is_allowed(prefer, c.values())]
            known[id(listed)] = places, tuple(listed[i] for i in places)
        return results.only(*known[id(listed)])

    return {name: kept(results) for name, results in slots.items()}


def allot(config: ConversionConfig, spec: ModelSpec, measurement: Measurement) -> Allocation:
    """Allocate bits for the target, whichever kind it is."""
    if config.bpw is None:
        return allocate_total(config, spec, measurement)
    assert config.fixed_head_bits is not None
    budget = int(decoder_numel(spec) * config.bpw)
    allocation = allocate_bits(spec, measurement.decoder, budget=budget, options=config.allocate)
    head = {spec.head.key: HEAD_PARAMS[config.fixed_head_bits]}
    return replace(allocation, params={**allocation.params, **head})


def allocate_total(
    config: ConversionConfig, spec: ModelSpec, measurement: Measurement
) -> Allocation:
    """Allocate bits so that all output weight files together stay within the target.

    Raises:
        ConfigError: the head's bits are to be chosen, but it was not measured.
        BudgetUnreachable: naming the smallest possible size.
    """
    slots = dict(measurement.decoder)
    fixed: dict[str, QuantParams] = {}
    if config.fixed_head_bits is not None:
        fixed[spec.head.key] = HEAD_PARAMS[config.fixed_head_bits]
    else:
        check_measured(config, measurement)
        slots[spec.head.key] = measurement.head
    target, block = total_target(config, spec), block_bytes(config, spec)
    spec = stored_spec(config, spec)
    least = smallest(slots)
    size = output_bytes(spec, projection_params(spec, least) | fixed, config.shard_size_mb) + block
    # headers grow by a few digits at most
    overhead = size * 8 - total_bits(least.values())
    # the digits of very many headers change with every choice: leave them some room
    room = len(slots) // 64 if len(slots) > MOST_EXACT else 0
    if size > target:
        raise size_unreachable(target, size, config.allocate)
    while True:
        allocation = allocate_bits(
            spec, slots, budget=target * 8 - overhead, options=config.allocate
        )
        allocation = replace(allocation, params={**allocation.params, **fixed})
        excess = output_bytes(spec, allocation.params, config.shard_size_mb) + block - target
        if excess <= 0:
            return allocation
        overhead += 8 * (excess + room)
        room *= 2


def total_target(config: ConversionConfig, spec: ModelSpec) -> int:
    """Return the target in bytes if it is a total; a bitrate concerns what is not carried."""
    if config.target_bytes is not None:
        return config.target_bytes
    assert config.bpw_total is not None
    weights = sum(map(math.prod, expected_tensors(spec).values()))
    apart = carried_bytes(stored_spec(config, spec)) + block_bytes(config, spec)
    return int(weights * config.bpw_total / 8) + apart


def smallest(slots: Slots) -> dict[str, CandidateResult]:
    """Return the candidate with the fewest bits of every slot."""
    return {name: results[int(results.bits.argmin())] for name, results in slots.items()}


def total_bits(results: Iterable[CandidateResult]) -> int:
    """Return the sum of the stored bits."""
    return sum(result.total_bits for result in results)


def total_nats(results: Iterable[CandidateResult]) -> float:
    """Return the sum of the estimated costs."""
    return math.fsum(result.nats or 0.0 for result in results)


def projection_params(
    spec: ModelSpec, chosen: Mapping[str, CandidateResult]
) -> dict[str, QuantParams]:
    """Return projection key → parameters of a choice per slot."""
    projections = slot_projections(spec)
    return {
        p.key: result.params[p.name] for name, result in chosen.items() for p in projections[name]
    }
