"""Measure what each candidate costs, in bits and in error.

States are those of the unquantized model throughout: errors do not accumulate here. The result is
`measurement.json` in the schema of exllamav2, with an `exl2flow` entry beside it.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from exl2flow.core.errors import QuantizationError
from exl2flow.core.options.config import RoundingOptions, RunOptions, ScaleSearch
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.store.files import write_json
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.core.store.store import StageFolder, versions
from exl2flow.kernels import get_ops, tensor_cores
from exl2flow.model import DenseLinear, ModelSpec, ProjectionSpec, Sublayer, SublayerPart
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.model.files.measured import arrays_file
from exl2flow.quant.measure.candidates import (
    PROJECTION_OPTIONS,
    candidates_for,
    single_widths,
)
from exl2flow.quant.measure.compact import (
    is_compact,
    read_numbers,
    read_results,
    write_compact,
    write_results,
)
from exl2flow.quant.measure.estimate import estimate_all, estimate_options, own_places
from exl2flow.quant.measure.measurement import (
    MEASUREMENT_FILE,
    Candidate,
    candidate_bits,
    read_entries,
)
from exl2flow.quant.measure.results import Results
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.error_feedback import (
    BATCH_ELEMENTS,
    BATCH_WEIGHT,
    RoundedMatrix,
    RoundingJob,
    gpu_batch_elements,
    padded_weight,
    round_matrices,
)
from exl2flow.quant.rounding.hessian import HessianFactor, collect_hessians
from exl2flow.quant.sensitivity.fisher import shared_factor
from exl2flow.quant.tokenize.stage import load_rows, unjudged_rows
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.needs import FLOAT, SUBLAYER_WEIGHT, ModelSizes
from exl2flow.quant.walk.source_model import SourceModel, device_of, row_batches
from exl2flow.quant.walk.walk import STATE_FILES, Store, SublayerWork, walk

ENTRY = 1100  # bytes of a measured candidate in the two files that hold it
COMPACT_ENTRY = 64  # the same in three files; its share of its slot's name included
LISTED = 128  # bytes of a candidate in a list that a sublayer's file has once
INDENTED = 5  # such lists take the space of one in `measurement.json`
LEAST_ACCURACY = 1e-6  # stored accuracies are cut off here
HOPELESS_ACCURACY = 0.1  # a sublayer whose best candidate is below this cannot be quantized


@dataclass(frozen=True, kw_only=True)
class Measuring(SublayerWork):
    """The work of `measure` at a sublayer: the error of its output under every candidate."""

    folder: StageFolder
    options: RoundingOptions
    compact: bool

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        accuracies = read_numbers(path, "accuracy")
        return f"rel_err={1 - max(accuracies):.4f}..{1 - min(accuracies):.4f}"

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store:
        """See `SublayerWork`: try all candidates, then advance the states unquantized."""
        coverage = Coverage.of(sublayer, states, self.options.expert_tokens)
        hessians, outputs = collect_hessians(sublayer, states, coverage=coverage)
        reading, note = sublayer.spec.reading, self.folder.note
        factors = {
            capture: shared_factor(reading(capture)[0], hessian, {}, self.options, note=note)
            for capture, hessian in hessians.items()
        }
        targets = torch.stack([outputs[row] for row in range(len(states))])
        results = {
            part.name: self._results(sublayer, part, states, targets, factors)
            for part in sublayer.spec.parts
        }
        states.copy_(targets)
        return partial(write_results, path, results, compact=self.compact)

    def _results(
        self,
        sublayer: Sublayer,
        part: SublayerPart,
        states: torch.Tensor,
        targets: torch.Tensor,
        factors: Mapping[str, HessianFactor],
    ) -> Results:
        """Return the candidates of a part, each with the error of the sublayer's output."""
        candidates = candidates_for(part)
        rounded, costs = _round_variants(
            sublayer, part, candidates, factors, self.options.scale_search
        )
        candidates = undominated(part, candidates, costs)
        originals = dict(sublayer.linears)
        errors = _candidate_errors(sublayer, part, states, targets, candidates, rounded)
        sublayer.linears.update(originals)
        accuracy = [max(LEAST_ACCURACY, 1 - error) for error in errors]
        best = max(accuracy)
        if best < HOPELESS_ACCURACY:
            raise QuantizationError(
                f"the best candidate of `{part.name}` only reaches accuracy {best:.3f}; "
                "the model or the calibration data is unusable: check both with `--dry-run`"
            )
        bits = [candidate_bits(part.projections, candidate) for candidate in candidates]
        return Results(
            candidates=candidates, bits=np.array(bits, np.int64), accuracy=np.array(accuracy)
        )


def _candidate_errors(
    sublayer: Sublayer,
    part: SublayerPart,
    states: torch.Tensor,
    targets: torch.Tensor,
    candidates: tuple[Candidate, ...],
    rounded: "Variants",
) -> list[float]:
    """Return each candidate's mean over rows of ‖y - y_ref‖ / ‖y_ref‖."""
    first = [p.name for p in part.projections if not p.is_last]
    last = [p.name for p in part.projections if p.is_last]
    device = device_of(sublayer)
    totals = torch.zeros(len(candidates), dtype=torch.float64, device=device)
    sharing: dict[tuple[QuantParams, ...], list[int]] = {}
    for index, candidate in enumerate(candidates):
        sharing.setdefault(tuple(candidate[name] for name in first), []).append(index)
    for members in sharing.values():
        inputs = [_linear(sublayer, name, candidates[members[0]], rounded) for name in first]
        sublayer.linears.update(zip(first, inputs, strict=True))
        outputs = {i: [_linear(sublayer, n, candidates[i], rounded) for n in last] for i in members}
        for rows in row_batches(sublayer, states):
            hidden, wanted = (x[rows].to(device) for x in (states, targets))
            reads, sizes = sublayer.reads(hidden), row_norms(wanted)
            for index, linears in outputs.items():
                look()
                sublayer.linears.update(zip(last, linears, strict=True))
                errors = row_norms(sublayer.output(hidden, reads) - wanted)
                totals[index] += (errors / sizes).sum()
    return (totals / len(states)).tolist()


def row_norms(x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row of states (rows, t, hidden)."""
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=(1, 2))
    return norms


Variants = dict[tuple[str, QuantParams], RoundedMatrix]
Costs = Mapping[tuple[str, QuantParams], float]


def undominated(
    part: SublayerPart, candidates: Sequence[Candidate], costs: Costs
) -> tuple[Candidate, ...]:
    """Return the candidates that may be on the Pareto front of bits and error, in order.

    A candidate is dropped if another one needs no more bits and costs no more in any projection.
    The largest one stays: it bounds the targets that can be reached.
    """
    prices = [
        (
            candidate_bits(part.projections, candidate),
            *(costs[name, params] for name, params in candidate.items()),
        )
        for candidate in candidates
    ]

    largest = max(bits for bits, *_ in prices)

    def is_dominated(price: tuple[float, ...]) -> bool:
        return price[0] < largest and any(
            other != price and all(map(operator.le, other, price)) for other in prices
        )

    pairs = zip(candidates, prices, strict=True)
    return tuple(candidate for candidate, price in pairs if not is_dominated(price))


def _round_variants(
    sublayer: Sublayer,
    part: SublayerPart,
    candidates: tuple[Candidate, ...],
    factors: Mapping[str, HessianFactor],
    search: ScaleSearch,
) -> tuple[Variants, Costs]:
    """Round each distinct (projection, parameters) once; pairs that share a Hessian together.

    A cost is the root of `tr(Eᵀ H E)`, H damped: the norm of the errors fed back.
    """
    variants: Variants = {}
    costs: dict[tuple[str, QuantParams], torch.Tensor] = {}
    for capture, item in factors.items():
        names = [p.name for p in part.projections if p.capture == capture]
        keys = list(dict.fromkeys((name, c[name]) for name in names for c in candidates))
        weights = {name: padded_weight(sublayer.linears[name]) for name in names}
        jobs = [RoundingJob(weight=weights[name], params=params) for name, params in keys]
        rounded = round_matrices(jobs, item, search=search, keep_fed_back=True)
        for key, matrix in zip(keys, rounded, strict=True):
            assert matrix.fed_back is not None
            norms = [torch.linalg.vector_norm(part) for part in matrix.fed_back.readings()]
            costs[key] = torch.linalg.vector_norm(torch.stack(norms))
            variants[key] = replace(matrix, fed_back=None)
    norms = torch.stack(list(costs.values())).tolist()
    return variants, dict(zip(costs, norms, strict=True))


def _linear(sublayer: Sublayer, name: str, candidate: Candidate, rounded: Variants) -> DenseLinear:
    """Return a projection with the weights that the decoder will reconstruct."""
    original = sublayer.linears[name]
    matrix = rounded[name, candidate[name]].dequantize()[:, : len(original.weight)]
    return DenseLinear(matrix.T.to(original.weight.dtype).contiguous(), original.bias)


def measure(run: StageRun[RunOptions]) -> None:
    """Write `measurement.json` of the source model into the stage folder."""
    spec, files, compact = share(run)
    run.settle({*files})
    if run.ranks.rank == 0:
        merge(run, spec, files, compact=compact)


@tensor_cores()
@torch.inference_mode()
def share(run: StageRun[RunOptions]) -> tuple[ModelSpec, list[str], bool]:
    """Write this rank's files; return the model, the files of all, and whether they are compact."""
    model = SourceModel.open(run.config, run.device, keeps_states=run.keeps_states)
    get_ops(run.device).prepare_rounding()
    folder = run.inputs["tokenize"]
    if "sensitivity" in run.inputs:
        rows = unjudged_rows(folder, "measure", run.config.held_out)
        compact = is_compact(len(model.spec.projections) + 1)
        files = estimate_all(run, model, rows)
    else:
        run.folder.manifest.total = len(model.spec.sublayers)
        compact = is_compact(sum(len(sublayer.parts) for sublayer in model.spec.sublayers))
        rows = load_rows(folder, "measure")  # costs that are not in nats are not judged
        work = Measuring(folder=run.folder, options=run.config.rounding, compact=compact)
        order = model.spec.sublayers
        files = [work.file(sublayer) for sublayer in order]
        own = own_places(run, files, [sublayer.projections for sublayer in order])
        walk(run, model, rows, work, to_end=False, own=own)
    return model.spec, files, compact


def merge(
    run: StageRun[RunOptions], spec: ModelSpec, files: Sequence[str], *, compact: bool
) -> None:
    """Write the measurement of a model from its sublayers' files, and commit it."""
    path = run.folder.path / MEASUREMENT_FILE
    written = (arrays_file(path), path) if compact else (path,)
    if all(run.folder.valid(file.name) for file in written):
        return  # it ended behind its last commit
    paths = [run.folder.path / file for file in files]
    entries: dict[str, object] = {}
    for part in () if compact else paths:
        entries |= read_entries(part)
    measurement = {
        "measurement": {"model.norm.norm": None, "lm_head.linear": None, **entries},
        "last_module_idx": len(spec.sublayers) + 2,  # embedding, sublayers, norm, head
        "exl2flow": {
            "fingerprint": run.folder.manifest.fingerprint,
            "versions": versions(),
            "options": json.loads(run.config.calibration.model_dump_json()),
            "notes": sorted(run.folder.manifest.notes),  # ranks add theirs at any time
        },
    }
    if not compact:
        run.folder.commit(MEASUREMENT_FILE, write_json(path, measurement))
        return
    slots = read_results(paths, spec)
    for file, sha256 in write_compact(path, slots, measurement).items():
        run.folder.commit(file.name, sha256)


def entry_bytes(spec: ModelSpec) -> int:
    """Return how many bytes the measured candidates of a model take at most."""
    slots, options = len(spec.projections) + 1, len(PROJECTION_OPTIONS)
    if not is_compact(slots):
        return ENTRY * slots * options
    lists = sum(_shapes(s.projections) for s in spec.sublayers) + 1
    lists += INDENTED * (_shapes(spec.projections) + 1)
    return COMPACT_ENTRY * slots * options + LISTED * options * lists


def _shapes(projections: Iterable[ProjectionSpec]) -> int:
    """Return the number of distinct shapes, each of which has a list of candidates."""
    return len({(p.in_features, p.out_features, p.has_bias) for p in projections})


def needs(config: RunOptions, sizes: ModelSizes) -> Need:
    """Forecast the stage, which keeps outputs of all rows beside their inputs.

    Many candidates are rounded at once. With Fisher factors each matrix is rounded by itself, and
    its errors are kept.
    """
    rows, tokens = config.calibration.measure_rows, config.calibration.measure_row_tokens
    states, widths = sizes.token * rows * tokens, len(single_widths(PROJECTION_OPTIONS))
    rounded = sizes.largest if sizes.factors else sizes.sublayer
    batch = min(max(BATCH_ELEMENTS, sizes.largest), widths * rounded)
    weights = FLOAT * sizes.sublayer + SUBLAYER_WEIGHT * rounded
    weights += (BATCH_WEIGHT + (FLOAT if sizes.factors else 0)) * batch
    batch = gpu_batch_elements(sizes.card.memory) if sizes.card else 0
    two = sorted(k * n for k, n in sizes.greatest)[-2:]  # matrices at a time
    work = sum(8 * min(max(batch, size), widths * size) for size in two)
    work += sizes.gpu_work(tokens, weight=8, square=3 * FLOAT)
    beside = sizes.together(widths, runs=2)
    work = max(work, sizes.group_work(tokens, weight=8, square=3 * FLOAT, beside=beside))
    return Need(
        memory_bytes=2 * states + sizes.walk_memory(weights, tokens),
        kept_bytes=entry_bytes(sizes.spec),
        passing_bytes=STATE_FILES * states,
        holds="sublayer",
        **sizes.on_gpu(work, states if sizes.factors else 2 * states),
    )


def _options(config: RunOptions) -> dict[str, object]:
    options: dict[str, object] = {"rope": config.rope.model_dump()}
    if config.sensitivity.kind == "fisher":
        return options | {"rounding": estimate_options(config.rounding)}
    used = {"scale_search", "damping", "expert_tokens"}
    known = config.rounding.fingerprinted()
    return options | {"rounding": {name: known[name] for name in used if name in known}}


MEASURE: Stage[RunOptions] = Stage(
    name="measure",
    schema=8,
    inputs=("tokenize", "sensitivity"),
    options=_options,
    run=measure,
    enabled=lambda config: config.measurement_file is None,
    gpu_options=lambda config: effect_of_limit(config, config.calibration.measure_row_tokens),
    needs=needs,
    is_shared=True,
    is_dealt=lambda config: True,
    share=share,
)
