"""Quantized matrices on their way to a file: packed, checked and reported; and in use."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from exl2flow.core.errors import ReconstructionMismatch
from exl2flow.core.reports import Json, MatrixReport, SublayerReport
from exl2flow.core.runtime.background import to_host
from exl2flow.core.store.files import tensor_bytes, write_tensors
from exl2flow.model import Linear, ProjectionSpec, QuantizedLinear, QuantizedMatrix, Sublayer
from exl2flow.model.files.exl2 import host_names
from exl2flow.quant.rounding.error_feedback import RoundedMatrix, padded
from exl2flow.quant.rounding.hessian import relative_error
from exl2flow.quant.sensitivity.fisher import Factors, estimated_nats
from exl2flow.quant.walk.walk import Store

Words = tuple[str | None, Json, MatrixReport | None]
Finish = Callable[[Sequence[MatrixReport], Mapping[str, torch.Tensor]], SublayerReport]


def reconstruction_digest(matrix: torch.Tensor) -> str:
    """Return the sha256 of a dequantized matrix, fp16 (k, n)."""
    return hashlib.sha256(tensor_bytes(matrix)).hexdigest()


class Packed:
    """A rounded matrix in its stored form, and the report on it once it is in main memory."""

    def __init__(
        self,
        projection: ProjectionSpec,
        linear: Linear,
        rounded: RoundedMatrix,
        hessian: torch.Tensor,
        factors: Factors | None = None,
        *,
        params: str | None = None,
        refined: Json | None = None,
    ) -> None:
        """Pack.

        Args:
            projection: the projection of the matrix.
            linear: the weights before rounding.
            rounded: the rounded matrix.
            hessian: of the projection's inputs, fp32 (k, k).
            factors: to estimate the cost; without them `nats` is None.
            params: the chosen parameters, if the report is to name them.
            refined: what `refine` adds to the report.
        """
        self.projection = projection
        self._params, self._refined = params, refined or {}
        self.matrix = rounded.pack(None if linear.bias is None else padded(linear.bias))
        values, weight = rounded.dequantize(), padded(linear.weight.T)
        self._figures = {
            "values": values,
            "wrong": torch.stack(
                [(part != values[:, columns]).any() for columns, part in self.matrix.parts()]
            ).any(),
            "rel_err": relative_error(hessian, weight, values),
        }
        if factors is not None:
            factors = factors.to(values.device)
            self._figures["nats"] = estimated_nats(values, factors, less=weight)

    @property
    def words(self) -> Words:
        """What other ranks need beside tensors: parameters, `refined`, the report if complete."""
        return self._params, self._refined, None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that `report` needs in main memory, by name."""
        return {f"{self.projection.key}/{name}": x for name, x in self._figures.items()}

    def report(self, host: Mapping[str, torch.Tensor]) -> MatrixReport:
        """Check that the packed matrix decodes to the rounded values, and report on it.

        Args:
            host: tensors in main memory, including those of `tensors()`.

        Raises:
            ReconstructionMismatch: the packed tensors decode to something else.
        """
        figures = {name: host[f"{self.projection.key}/{name}"] for name in self._figures}
        if figures["wrong"]:
            raise ReconstructionMismatch(
                f"the packed tensors of `{self.projection.key}` do not decode to the rounded "
                "matrix; this is a defect of exl2flow: report it with the model's name"
            )
        return MatrixReport(
            name=self.projection.name,
            key=self.projection.key,
            params=self._params,
            rel_err=float(figures["rel_err"]),
            nats=float(figures["nats"]) if "nats" in figures else None,
            bits=self.matrix.total_bits,
            bpw=self.matrix.total_bits / figures["values"].numel(),
            sha256=reconstruction_digest(figures["values"]),
            refined=self._refined,
        )


class Received(Packed):
    """A matrix that another rank has packed."""

    def __init__(
        self,
        projection: ProjectionSpec,
        stored: Mapping[str, torch.Tensor],
        figures: Mapping[str, torch.Tensor],
        words: Words,
    ) -> None:
        """Take it.

        Args:
            projection: the projection of the matrix.
            stored: tensors of its stored form, by their names there.
            figures: what `Packed.tensors` returned at that rank; rank 0 alone has them.
            words: of that rank's.
        """
        self.projection = projection
        self._params, self._refined, self._report = words
        self.matrix = _received(projection.key, stored)
        begin = f"{projection.key}/"
        self._figures = {
            name.removeprefix(begin): x for name, x in figures.items() if name.startswith(begin)
        }

    def report(self, host: Mapping[str, torch.Tensor]) -> MatrixReport:
        """See `Packed`."""
        return super().report(host) if self._report is None else self._report


def _received(key: str, stored: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
    """Return the matrix of a key, on the device of its tensors, as if it came from a file."""
    host = {name: stored[name].cpu() for name in host_names(key)}
    matrix = QuantizedMatrix.from_tensors(key, {**stored, **host})
    return matrix.to(matrix.packed.device)


class Unchanged(Packed):
    """A matrix that stays as it is stored, and the report on it."""

    def __init__(
        self, projection: ProjectionSpec, matrix: QuantizedMatrix, report: MatrixReport
    ) -> None:
        self.projection, self.matrix, self._report = projection, matrix, report

    @property
    def words(self) -> Words:
        """See `Packed`."""
        return None, {}, self._report

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Packed`: none, the report is complete."""
        return {}

    def report(self, host: Mapping[str, torch.Tensor]) -> MatrixReport:
        """See `Packed`."""
        return self._report


def storing(
    path: Path,
    packed: Sequence[Packed],
    figures: Mapping[str, torch.Tensor],
    finish: Finish,
) -> Store:
    """Start copying packed matrices; return a function that writes them with their report.

    Args:
        path: the file.
        packed: the matrices.
        figures: other tensors that the report needs.
        finish: builds the report from those on the matrices and the figures.
    """
    stored: dict[str, torch.Tensor] = {}
    reported = dict(figures)
    for item in packed:
        stored |= item.matrix.to_tensors(item.projection.key)
        reported |= item.tensors()
    waiting = to_host(stored | reported)

    def store() -> str:
        host = waiting()
        report = finish([item.report(host) for item in packed], host)
        metadata = {"report": json.dumps(report.to_json())}
        return write_tensors(path, {name: host[name] for name in stored}, metadata=metadata)

    return store


def install(sublayer: Sublayer, projection: ProjectionSpec, matrix: QuantizedMatrix) -> None:
    """Put a matrix into a sublayer."""
    linear = sublayer.linears[projection.name]
    sublayer.linears[projection.name] = as_stored(linear, projection, matrix)


def as_stored(
    linear: Linear, projection: ProjectionSpec, matrix: QuantizedMatrix
) -> QuantizedLinear:
    """Return a matrix as what takes the place of a linear map, where that is."""
    weight = linear.weight
    return QuantizedLinear(
        matrix, out_features=projection.out_features, dtype=weight.dtype, device=weight.device
    )
