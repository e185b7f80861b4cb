"""The allocate stage: allocate bits; in further rounds try the result, correct costs, and repeat.

Errors interact. A further round runs whole allocations end to end on held-out rows and scales each
sublayer's costs to its effect among the other quantized sublayers; the best allocation is kept.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from exl2flow.core.options.config import TARGETS, AllocateOptions, ConversionConfig
from exl2flow.core.options.ignored import has_costs_in_nats, objective_read
from exl2flow.core.store.files import digest, read_json, write_json
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import tensor_cores
from exl2flow.model import ModelSpec, SublayerSpec, resolve
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.model.files.measured import measurement_files
from exl2flow.quant.allocate.block import block_options
from exl2flow.quant.allocate.budget import (
    ALLOCATION_FILE,
    Allocation,
    allot,
    check_measured,
    is_in_nats,
    projection_params,
    read_candidates,
    total_bits,
    total_nats,
)
from exl2flow.quant.allocate.layout import Choice
from exl2flow.quant.allocate.trials import Trials, Verdict
from exl2flow.quant.measure.estimate import estimate_options
from exl2flow.quant.measure.measurement import (
    MEASUREMENT_FILE,
    Measurement,
    projection_bits,
    read_measurement,
)
from exl2flow.quant.tokenize.stage import judging_rows, split_rows
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.needs import SUBLAYER_WEIGHT, ModelSizes
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.working_memory import working_bytes

log = logging.getLogger(__name__)

HESSIAN_ROWS = 16  # approximate number of rows for the Hessians of trials
CORRECTION_RANGE = (0.25, 8.0)  # of the ratio of a sublayer's measured to its estimated cost


def allocate(run: StageRun[ConversionConfig]) -> None:
    """Write `allocation.json` for the target into the stage folder."""
    config, folder = run.config, run.folder
    if all(map(folder.valid, (*folder.manifest.files, ALLOCATION_FILE))):
        return  # it ended behind its last commit
    spec = resolve(config.source)
    rounds = config.allocate.rounds
    walks = rounds + 1 if rounds else 0  # at most, each over all sublayers
    total = folder.manifest.total = walks * len(spec.sublayers) + 1
    given = config.measurement
    path = given if given is not None else run.inputs["measure"] / MEASUREMENT_FILE
    measurement = read_candidates(config, spec, path)
    allocation = allot(config, spec, measurement)
    tried: list[dict[str, object]] = []
    if rounds:
        allocation, tried = improve(run, spec, measurement, allocation)
    log.info("bpw=%.4f objective=%s %s", allocation.bpw, allocation.value, allocation.status)
    params = {key: value.to_json() for key, value in allocation.params.items()}
    content = {**allocation.to_json(), "tried": tried, "params": params}
    sha256 = write_json(folder.path / ALLOCATION_FILE, content)
    folder.commit(ALLOCATION_FILE, sha256, cursor=total)
    run.tick(total, total, f"bpw={allocation.bpw:.4f}")


@tensor_cores()
@torch.inference_mode()
def improve(
    run: StageRun[ConversionConfig], spec: ModelSpec, measurement: Measurement, first: Allocation
) -> tuple[Allocation, list[dict[str, object]]]:
    """Try allocations end to end, correct the costs, and return the best and all that were tried.

    Raises:
        ConfigError: there are no costs in nats to correct.
    """
    config = run.config
    check_measured(config, measurement)
    training, held_out = split_rows(run.inputs["tokenize"], run.config.held_out)
    trials = Trials(
        SourceModel.open(config, run.device),
        run.inputs["sensitivity"],
        config.rounding,
        training[:: max(1, len(training) // HESSIAN_ROWS)],
    )
    judged = partial(_judged, run, trials, held_out)
    allocations = {"estimate": first, "uniform": uniform_allocation(spec, measurement, first)}
    verdict = judged(0, {name: tried.params for name, tried in allocations.items()})
    divergences = dict(verdict.divergences)
    current = first
    for number in range(1, config.allocate.rounds + 1):
        total = next(iter(verdict.divergences.values()))
        measurement = corrected(spec, measurement, current, verdict.without, total)
        current = allot(config, spec, measurement)
        name, least = f"corrected {number}", min(divergences.values())
        verdict = judged(number, {name: current.params})
        allocations[name] = current
        divergences |= verdict.divergences
        log.info("allocation=%s kl=%.5f", name, divergences[name])
        if divergences[name] >= least:
            break
    best = min(divergences, key=divergences.__getitem__)
    return allocations[best], [{"name": name, "kl": kl} for name, kl in divergences.items()]


def _judged(
    run: StageRun[ConversionConfig],
    trials: Trials,
    held_out: torch.Tensor,
    number: int,
    choices: Mapping[str, Choice],
) -> Verdict:
    """Return the verdict of the walk with this number; that of an earlier run is read back.

    Raises:
        Interrupted: a signal came; earlier verdicts are kept.
    """
    folder, file = run.folder, f"trials/{number}.json"
    count = len(trials.model.spec.sublayers)
    done = number * count

    def passed(sublayer: SublayerSpec) -> None:
        detail = f"{' and '.join(choices)} {sublayer.name}"
        run.tick(done + sublayer.index + 1, folder.manifest.total, detail)
        run.stop_if_asked()

    if not folder.valid(file):
        run.tick(done, folder.manifest.total)
        verdict = trials.judge(choices, held_out, passed=passed)
        sha256 = write_json(folder.path / file, asdict(verdict))
        folder.commit(file, sha256, cursor=done + count)
        run.stop_if_asked()
    return Verdict(**read_json(folder.path / file))


@dataclass(slots=True)
class _Alike:
    """Candidates of the same parameters: their places by matrix, and what they take and cost."""

    places: dict[str, int] = field(default_factory=dict)
    bits: int = 0
    nats: list[float] = field(default_factory=list)


def uniform_allocation(spec: ModelSpec, measurement: Measurement, first: Allocation) -> Allocation:
    """Return the best allocation with the same parameters for all decoder matrices.

    It keeps the head of `first` and uses no more bits; `first` itself if none fits.
    """
    projections = spec.projections
    budget = sum(projection_bits(p, first.params[p.key]) for p in projections)
    alike: dict[QuantParams, _Alike] = {}
    for p in projections:
        for place, result in enumerate(measurement.decoder[p.key]):
            found = alike.setdefault(result.params[p.name], _Alike())
            found.places[p.key] = place
            found.bits += result.total_bits
            found.nats.append(result.nats or 0.0)
    fitting = [
        (math.fsum(found.nats), found.bits, found.places)
        for found in alike.values()
        if len(found.places) == len(projections) and found.bits <= budget
    ]
    if not fitting:
        return first
    _, _, chosen = min(fitting, key=lambda priced: priced[:2])
    choice = {**first.choice, **{k: measurement.decoder[k][at] for k, at in chosen.items()}}
    return replace(
        first,
        choice=choice,
        params={**first.params, **projection_params(spec, choice)},
        used_bits=total_bits(choice.values()),
        value=total_nats(choice.values()),
        status="uniform",
    )


def corrected(
    spec: ModelSpec,
    measurement: Measurement,
    allocation: Allocation,
    without: Mapping[str, float],
    total: float,
) -> Measurement:
    """Return the measurement with each block's costs scaled to its effect among the others.

    Args:
        spec: the model.
        measurement: in nats.
        allocation: the allocation that was tried.
        without: divergence with one block left unquantized, by its name.
        total: divergence of the whole allocation.
    """
    decoder = dict(measurement.decoder)
    blocks: dict[str, list[str]] = {}
    for sublayer in spec.sublayers:
        blocks.setdefault(sublayer.block, []).extend(p.key for p in sublayer.projections)
    for block, keys in blocks.items():
        expected = total_nats(allocation.choice[key] for key in keys)
        if expected <= 0:
            continue
        low, high = CORRECTION_RANGE
        scale = min(max((total - without[block]) / expected, low), high)
        for key in keys:
            decoder[key] = decoder[key].scaled(scale)
    return replace(measurement, decoder=decoder)


def needs(config: ConversionConfig, sizes: ModelSizes) -> Need | None:
    """Forecast rounds: states of two allocations, the source, and one trial per sublayer."""
    if not config.allocate.rounds:
        return None
    rows, tokens = config.calibration.rows, config.calibration.row_tokens
    judging = judging_rows(config.held_out, rows)
    training = rows - judging
    seen = len(range(0, training, max(1, training // HESSIAN_ROWS)))
    states = sizes.token * tokens * (2 * seen + (3 + len(sizes.spec.sublayers)) * judging)
    working = sizes.walk_memory(sizes.worked_on(SUBLAYER_WEIGHT), tokens)
    work = working_bytes(sizes.spec, sizes.card.memory) if sizes.card else 0
    return Need(memory_bytes=states + working, holds="sublayer", **sizes.on_gpu(work, states))


def _options(config: ConversionConfig) -> dict[str, object]:
    prefer, experts = config.allocate.prefer, config.allocate.experts
    return {
        "target": {name: getattr(config, name) for name in TARGETS},
        "head_bits": config.fixed_head_bits,
        "shard_size_mb": config.shard_size_mb if config.bpw is None else None,
        "allocate": {"rounds": config.allocate.rounds, **_objective(config)},
        **({} if prefer == "quality" else {"prefer": prefer}),  # as before there was a choice
        **({} if experts == "each" else {"experts": experts}),
        "rounding": estimate_options(config.rounding) if config.allocate.rounds else None,
        "measurement": digest(config.measurement) if config.measurement else None,
        **_block(config),
    }


def _block(config: ConversionConfig) -> dict[str, object]:
    """Return what a total target depends on besides: the bytes of a block that drafts tokens."""
    if config.bpw is not None:
        return {}
    known = block_options(config)
    return known | ({"mtp_bpw": config.mtp.bpw} if known.get("mtp") == "quantize" else {})


def _objective(config: ConversionConfig) -> dict[str, object]:
    """Return the objective that costs are added by; the default if they are in nats."""
    usual, given = (objective_read(o) for o in (AllocateOptions(), config.allocate))
    if given == usual or has_costs_in_nats(config):
        return usual
    if config.measurement is None:
        return given
    measurement = read_measurement(config.measurement, resolve(config.source))
    return usual if is_in_nats(measurement.decoder) else given


ALLOCATE: Stage[ConversionConfig] = Stage(
    name="allocate",
    schema=3,
    inputs=("tokenize", "sensitivity", "measure"),
    options=_options,
    run=allocate,
    files=lambda config: measurement_files(config.measurement) if config.measurement else (),
    gpu_options=lambda config: (
        effect_of_limit(config, config.calibration.row_tokens) if config.allocate.rounds else {}
    ),
    needs=needs,
)
