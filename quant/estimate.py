"""Estimate what rounding each projection costs in nats, from its Fisher factors.

The second kind of measurement: no candidate is run through the model. Every projection, and the
head, is a slot of its own. Only matrices of one width are rounded: a mixed one costs what its rows
cost in those (`docs/concepts/quality.md`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from exl2flow.core.config import RoundingOptions
from exl2flow.core.errors import QuantizationError
from exl2flow.core.files import digest, read_json, write_json
from exl2flow.core.stage import StageRun
from exl2flow.core.store import StageFolder
from exl2flow.model import DenseLinear, Linear, ProjectionSpec, Sublayer
from exl2flow.model.exl2 import QuantParams
from exl2flow.quant.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS, single_widths
from exl2flow.quant.divergence import divergence
from exl2flow.quant.fisher import Factors, estimate
from exl2flow.quant.gptq import RoundingJob, padded_weight, round_matrices
from exl2flow.quant.hessian import collect_hessians, factor, head_hessian, mixed, relative_error
from exl2flow.quant.measurement import CandidateResult, projection_bits
from exl2flow.quant.sensitivity import read_factors
from exl2flow.quant.source import SourceModel
from exl2flow.quant.walk import OverSource, walk

HEAD_FILE = "sublayers/head.json"
HEAD_ROWS = 2  # rows on which the head's candidates are compared
HOPELESS_ERROR = 0.9  # a projection whose best candidate is above this cannot be quantized
REFERENCE = (
    3,
    128,
)  # bits and group size where the gain of rounding in the outputs' metric is measured


class Estimating(OverSource):
    """The work of `measure` at a sublayer when there are Fisher factors."""

    def __init__(self, folder: StageFolder, factors: Path, options: RoundingOptions) -> None:
        self.folder = folder
        self.factors = factors
        self.options = options

    def describe(self, path: Path) -> str:
        """See `SublayerWork`."""
        nats = [entry["nats"] for entries in read_json(path).values() for entry in entries]
        return f"nats={min(nats):.2g}..{max(nats):.2g}"

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> str:
        """See `SublayerWork`: try all candidates, then let the states pass unquantized."""
        hessians, outputs = collect_hessians(sublayer, states)
        factors = read_factors(self.factors, sublayer.spec.index)
        results: dict[str, list[CandidateResult]] = {}
        for spec in sublayer.spec.projections:
            linear, hessian = sublayer.linears[spec.name], hessians[spec.capture]
            found = self.projection(spec, linear, hessian, factors[spec.name])
            results[spec.key] = found.results(PROJECTION_OPTIONS)
        for row, output in outputs.items():
            states[row] = output
        return _write(path, results)

    def projection(
        self, spec: ProjectionSpec, linear: Linear, hessian: torch.Tensor, factors: Factors
    ) -> "Projection":
        """Factor the Hessian of a projection, and record what had to be done for that."""
        found = Projection(spec, linear, hessian, factors.to(hessian.device), self.options)
        if found.item.remedy:
            self.folder.note(f"{spec.key}: {found.item.remedy}")
        return found


class Projection:
    """A projection, and what rounding it costs."""

    def __init__(
        self,
        spec: ProjectionSpec,
        linear: Linear,
        hessian: torch.Tensor,
        factors: Factors,
        options: RoundingOptions,
    ) -> None:
        self.spec, self.hessian, self.factors, self.options = spec, hessian, factors, options
        self.weight = padded_weight(linear)
        shared = mixed(hessian, factors.input, options.fisher_share)
        self.item = factor(shared, damping=options.damping, name=spec.key)

    def results(
        self,
        options: Sequence[QuantParams],
        nats: Callable[[torch.Tensor], float] | None = None,
    ) -> list[CandidateResult]:
        """Return the cost of every candidate.

        Args:
            options: the candidates.
            nats: cost of a matrix fp32 (k, n). None: the estimate by the factors, less what is
                gained when outputs are regarded, too.

        Raises:
            QuantizationError: the best one is hopeless.
        """
        bands = single_widths(options)
        rounded = self.rounded(QuantParams.uniform(*band) for band in bands)
        costs = {
            band: self._row_costs(matrix, (nats or self.nats)(matrix))
            for band, matrix in zip(bands, rounded, strict=True)
        }
        gain = 1.0 if nats else self._gain(float(costs[REFERENCE][0].sum()))
        found = [self._result(params, costs, gain) for params in options]
        best = 1 - max(result.accuracy for result in found)
        if best > HOPELESS_ERROR:
            raise QuantizationError(
                f"the best candidate of `{self.spec.key}` has a relative error of {best:.3f}; "
                "the model or the calibration data is unusable: check both with `--dry-run`"
            )
        return found

    def _result(
        self,
        params: QuantParams,
        costs: Mapping[tuple[int, int], torch.Tensor],
        gain: float,
    ) -> CandidateResult:
        """Add up the costs (2, k) of each band's rows at its width."""
        nats, squared_error = (
            torch.stack(
                [
                    costs[band.bits, band.group_size][:, band.start : band.stop].sum(dim=1)
                    for band in params.bands(self.spec.in_features)
                ]
            )
            .sum(dim=0)
            .tolist()
        )
        return CandidateResult(
            accuracy=max(0.0, 1 - squared_error**0.5),
            total_bits=projection_bits(self.spec, params),
            params={self.spec.name: params},
            nats=gain * nats,
        )

    def nats(self, matrix: torch.Tensor) -> float:
        """Return the estimate for a matrix fp32 (k, n)."""
        return estimate(matrix - self.weight, self.factors)

    def _row_costs(self, matrix: torch.Tensor, nats: float) -> torch.Tensor:
        """Divide nats and squared relative error of a matrix among its rows, fp64 (2, k).

        Error feedback makes of a row's error what later rows cannot mend: rows of `U⁻ᵀ E` do not
        correlate in the metric of the Hessian, so that each has a share of the objective.
        """
        error = (matrix - self.weight)[self.item.perm]
        unmended: torch.Tensor = torch.linalg.solve_triangular(
            self.item.upper.T, error, upper=False
        )
        objective = (self.factors.output.apply(unmended) * unmended).sum(dim=1)
        shares = objective.clamp(min=0).double().cpu()
        shares /= shares.sum().clamp(min=torch.finfo(torch.float64).tiny)
        squared = relative_error(self.hessian, self.weight, matrix) ** 2
        whole = torch.tensor([[nats], [squared]], dtype=torch.float64)
        return whole * shares

    def rounded(
        self, options: Iterable[QuantParams], output: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield the dequantized matrix fp32 (k, n) of each of the parameters."""
        jobs = [RoundingJob(weight=self.weight, params=p, output=output) for p in options]
        found = round_matrices(jobs, self.item, search=self.options.scale_search)
        return (matrix.dequantize().float() for matrix in found)

    def _gain(self, without: float) -> float:
        """Return what part is left of the cost of `REFERENCE` when outputs are regarded, too."""
        if not self.options.rounds or without <= 0:
            return 1.0
        output = self.factors.output.damped(self.options.output_damping).blocks
        matrix = next(self.rounded([QuantParams.uniform(*REFERENCE)], output))
        return min(1.0, self.nats(matrix) / without)


def estimate_options(options: RoundingOptions) -> dict[str, object]:
    """Return what of the options changes an estimate."""
    used = {"scale_search", "damping", "fisher_share", "output_damping"}
    return {**options.model_dump(include=used), "two_sided": options.rounds > 0}


def estimate_slots(run: StageRun, model: SourceModel, rows: torch.Tensor) -> dict[str, object]:
    """Return projection key → entries of `measurement.json`, the head's among them.

    Args:
        run: of the stage `measure`.
        model: the source.
        rows: int64 (rows, t).
    """
    folder = run.folder
    folder.manifest.total = len(model.spec.sublayers) + 1
    work = Estimating(folder, run.inputs["sensitivity"], run.config.rounding)
    states = walk(run, model, rows, work, to_end=not folder.valid(HEAD_FILE))
    if states is not None:
        sha256 = _write(folder.path / HEAD_FILE, {model.spec.head.key: _head(model, states, work)})
        folder.commit(HEAD_FILE, sha256, cursor=folder.manifest.total)
    run.tick(folder.manifest.total, folder.manifest.total, "lm_head")
    files = [*map(work.file, model.spec.sublayers), HEAD_FILE]
    return {key: value for name in files for key, value in read_json(folder.path / name).items()}


def _head(model: SourceModel, states: torch.Tensor, work: Estimating) -> list[CandidateResult]:
    """Measure the head's candidates on final states fp32 (rows, t, hidden)."""
    spec, head = model.spec.head, model.head()
    factors = read_factors(work.factors, "head")[spec.name]
    step = max(1, len(states) // HEAD_ROWS)
    chosen = states[::step][:HEAD_ROWS]
    inputs = torch.cat([head.normed(row[None].to(model.device))[0] for row in chosen])

    def nats(matrix: torch.Tensor) -> float:
        columns = len(head.linear.weight)
        found = DenseLinear(matrix.T.contiguous(), head.linear.bias, out_features=columns)
        return divergence(head.linear, inputs, found, inputs)

    found = work.projection(spec, head.linear, head_hessian(head, states), factors)
    return found.results(HEAD_OPTIONS, nats)


def _write(path: Path, results: Mapping[str, list[CandidateResult]]) -> str:
    write_json(path, {key: [item.to_json() for item in items] for key, items in results.items()})
    return digest(path)
