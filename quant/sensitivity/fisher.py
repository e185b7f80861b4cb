"""Kronecker-Fisher factors: the cost of an error in a matrix, in nats of KL divergence per token.

The Fisher information of a projection is approximated by the product of a factor of its inputs and
one of its output gradients. Only diagonal blocks of the output factor are kept: in full its size
would be the square of the out-features.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional

from exl2flow.core.options.config import RoundingOptions
from exl2flow.core.runtime.background import to_host
from exl2flow.core.store.files import read_metadata, read_tensors, write_tensors
from exl2flow.kernels import CHUNK_ELEMENTS
from exl2flow.model import ProjectionSpec
from exl2flow.model.files.exl2 import COLUMN_MULTIPLE, padded_columns
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    column_chunks,
    factor,
    factor_together,
    mixed,
)
from exl2flow.quant.walk.deal import Accumulated, NamedSums

LEAST_TRACE = 1e-30  # of an output factor, against division by zero
CAPTURES_KEY = "captures"  # header entry: projection → [input factor, columns, output factor]
LAYER_KEY = "layer"  # header entry: the file of what experts of a layer share ...
EXPERTS_KEY = "experts"  # ... and there: projection → role, place among those of this role


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFactor:
    """`H_O = Σ g gᵀ / T` of output gradients g, in diagonal blocks.

    blocks: fp32 (number, b, b), number · b = n.
    columns: out-features as stored, a multiple of 32; `n` below. Padding has no gradient.
    """

    blocks: torch.Tensor
    columns: int

    @property
    def trace(self) -> float:
        """The mean of |g|² per token."""
        return float(self.diagonal().sum())

    def diagonal(self) -> torch.Tensor:
        """Return the mean of g² per out-feature, fp32 (n,)."""
        return self.blocks.diagonal(dim1=-2, dim2=-1).flatten()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x H_O`, (..., n)."""
        number, size, _ = self.blocks.shape
        split = _split(x.reshape(-1, self.columns), number, size)  # (number, m, b)
        return torch.bmm(split, self.blocks).transpose(0, 1).reshape(x.shape)

    def parts(
        self, x: torch.Tensor, less: torch.Tensor | None = None
    ) -> Iterator[tuple[Self, torch.Tensor]]:
        """Split the columns of x (m, n), or of x - less, together with the factor."""
        size = self.blocks.shape[-1]
        step = max(1, CHUNK_ELEMENTS // len(x) // size) * size
        for columns, part in column_chunks(x, less, step=step):
            blocks = self.blocks[columns.start // size : -(-columns.stop // size)]
            yield replace(self, blocks=blocks, columns=part.shape[1]), part

    def row_norms(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x H_O xᵀ` of each row of x (m, n), (m,)."""
        norms = x.new_zeros(len(x))
        for output, part in self.parts(x):
            norms += (output.apply(part) * part).sum(dim=1)
        return norms

    def damped(self, share: float) -> Self:
        """Return `H_O / mean(diag H_O) + share · I`."""
        mean = self.diagonal().mean().clamp(min=LEAST_TRACE)
        identity = torch.eye(
            self.blocks.shape[-1], dtype=self.blocks.dtype, device=self.blocks.device
        )
        return replace(self, blocks=self.blocks / mean + share * identity)

    def to(self, device: torch.device | str) -> Self:
        """Return the factor on a device."""
        return replace(self, blocks=self.blocks.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The cost of a projection's error; in-features are in the order of the source.

    input: fp32 (k, k), `mean over p of Σ |g_p|² x xᵀ / (T tr H_O of p)`, p the projections that
    read the same activation, which share it.
    """

    input: torch.Tensor
    output: OutputFactor

    def to(self, device: torch.device | str) -> Self:
        """Return the factors on a device."""
        return replace(self, input=self.input.to(device), output=self.output.to(device))


def estimate(error: torch.Tensor, factors: Factors, *, less: torch.Tensor | None = None) -> float:
    """Return `estimated_nats` as a number."""
    return float(estimated_nats(error, factors, less=less))


def estimated_nats(
    error: torch.Tensor, factors: Factors, *, less: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `½ Σ (H_I E H_O) E`, the KL divergence in nats per token that an error causes.

    Args:
        error: `Q - W`, (k, n), columns as stored; or Q alone.
        factors: of the projection, on the same device.
        less: W, in that case.

    Returns:
        fp32 (), on the device: the host does not wait for it.
    """
    total = factors.input.new_zeros(())
    for output, part in factors.output.parts(error, less):
        total = total + (factors.input @ part).mul_(output.apply(part)).sum()
    return total / 2


def shared_factor(
    first: ProjectionSpec,
    hessian: torch.Tensor,
    factors: Mapping[str, Factors],
    options: RoundingOptions,
    *,
    note: Callable[[str], None] = lambda text: None,
) -> HessianFactor:
    """Factor the Hessian shared by all projections that read one activation.

    Args:
        first: the first of the projections.
        hessian: of their inputs, fp32 (k, k).
        factors: of each projection by name, or empty.
        options: of rounding.
        note: records a remedy that the factor needed.
    """
    return shared_factors([first], [hessian], factors, options, note=note)[0]


def shared_factors(
    firsts: Sequence[ProjectionSpec],
    hessians: Sequence[torch.Tensor],
    factors: Mapping[str, Factors],
    options: RoundingOptions,
    *,
    note: Callable[[str], None] = lambda text: None,
) -> list[HessianFactor]:
    """Return what `shared_factor` returns for several Hessians of one size."""
    blends = [
        mixed(hessian, factors[p.name].input if factors else None, options.fisher_share)
        for p, hessian in zip(firsts, hessians, strict=True)
    ]
    names = [p.reads for p in firsts]
    if len(blends) > 1:
        items = factor_together(blends, damping=options.damping, names=names)
    else:
        items = [factor(blends[0], damping=options.damping, name=names[0])]
    for name, item in zip(names, items, strict=True):
        if item.remedy:
            note(f"{name}: {item.remedy}")
    return items


def block_size(columns: int, limit: int) -> int:
    """Return the largest equal block size within `limit`, a multiple of 32; 0: no limit."""
    units = columns // COLUMN_MULTIPLE
    most = units if limit == 0 else max(1, limit // COLUMN_MULTIPLE)
    fits = max(count for count in range(1, min(most, units) + 1) if units % count == 0)
    return fits * COLUMN_MULTIPLE


class FactorSum(Accumulated):
    """Sums over tokens for the two factors of one projection, fp32; count: of tokens."""

    summed = ("input", "blocks", "squares")

    def __init__(
        self, in_features: int, out_features: int, *, block: int, device: torch.device
    ) -> None:
        """Start at zero; `block` limits the out-features per block, 0 means a single block."""
        self.columns = padded_columns(out_features)
        size = block_size(self.columns, block)
        number = self.columns // size
        self.input = torch.zeros(in_features, in_features, device=device)
        self.blocks = torch.zeros(number, size, size, device=device)
        self.squares = torch.zeros((), device=device)  # Σ |g|²

    def add(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add tokens: inputs (t, k) and gradients of the outputs (t, n), not padded."""
        squares = gradient.square().sum(-1)
        self.squares += squares.sum()
        self.count += len(x)
        self.add_input(x, squares)
        self.add_products(gradient, sign=1)

    def add_input(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Add `Σ weight x xᵀ` of inputs (t, k) and weights (t,)."""
        self.input.addmm_((x * weight[:, None]).T, x)

    def add_products(self, vectors: torch.Tensor, *, sign: int) -> None:
        """Add `sign · Σ v vᵀ` of vectors (t, n) to the output factor."""
        number, size, _ = self.blocks.shape
        split = _split(vectors, number, size)  # (number, t, b)
        self.blocks.baddbmm_(split.transpose(1, 2), split, alpha=sign)

    def add_diagonal(self, values: torch.Tensor) -> None:
        """Add values (n,) to the diagonal of the output factor."""
        number, size, _ = self.blocks.shape
        padded = functional.pad(values, (0, number * size - len(values)))
        self.blocks.diagonal(dim1=-2, dim2=-1).add_(padded.view(number, size))

    def output(self, tokens: int) -> OutputFactor:
        """Return the output factor, given the number of tokens."""
        return OutputFactor(blocks=self.blocks / tokens, columns=self.columns)

    def factors(self, tokens: int) -> Factors:
        """Return the factors of this projection alone."""
        output = self.output(tokens)
        scale = tokens * max(output.trace, LEAST_TRACE)
        return Factors(input=self.input / scale, output=output)


Sums = NamedSums[FactorSum]  # by projection


def storing_factors(
    path: Path, projections: tuple[ProjectionSpec, ...], sums: Mapping[str, FactorSum], tokens: int
) -> Callable[[], str]:
    """Return a function that writes the factors of one sublayer and returns the sha256."""
    tensors, captures = sublayer_tensors(projections, sums, tokens)
    waiting, metadata = to_host(tensors), {CAPTURES_KEY: json.dumps(captures)}
    return lambda: write_tensors(path, waiting(), metadata=metadata)


Captures = dict[str, tuple[str, int, str]]  # projection → input factor, columns, output factor


def sublayer_tensors(
    projections: tuple[ProjectionSpec, ...], sums: Mapping[str, FactorSum], tokens: int
) -> tuple[dict[str, torch.Tensor], Captures]:
    """Return packed factors of projections by name, and which ones each projection has."""
    tensors: dict[str, torch.Tensor] = {}
    captures: Captures = {}
    for capture in dict.fromkeys(p.capture for p in projections):
        members = [p for p in projections if p.capture == capture]
        shared: torch.Tensor | None = None
        for projection in members:
            factors = sums[projection.name].factors(tokens)
            part = factors.input.div_(len(members))
            shared = part if shared is None else shared.add_(part)
            tensors[f"{projection.name}.output"] = pack_symmetric(factors.output.blocks)
            output = f"{projection.name}.output"
            captures[projection.name] = (f"{capture}.input", factors.output.columns, output)
        assert shared is not None
        tensors[f"{capture}.input"] = pack_symmetric(shared)
    return tensors, captures


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFactors:
    """Factors as files have them.

    tensors: packed, by name, what experts share included; captures: of each projection; experts:
    projection of a layer's experts → role and place among those of this role; empty without.
    """

    tensors: Mapping[str, torch.Tensor]
    captures: Mapping[str, tuple[str, int, str]]
    experts: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, *, pinned: bool = False) -> Self:
        """Read a file, into pinned memory if it will be sent to a device.

        Raises:
            CorruptCheckpoint: the file is missing or damaged.
        """
        tensors, metadata, experts = read_tensors(path), read_metadata(path), {}
        if LAYER_KEY in metadata:
            shared = path.parent.parent / metadata[LAYER_KEY]
            tensors |= read_tensors(shared)
            experts = json.loads(read_metadata(shared)[EXPERTS_KEY])
        if pinned:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        captures = {  # earlier files do not name output factors
            name: (shared, columns, *(output or [f"{name}.output"]))
            for name, (shared, columns, *output) in json.loads(metadata[CAPTURES_KEY]).items()
        }
        return cls(tensors=tensors, captures=captures, experts=experts)

    def whole(self, name: str, device: torch.device | str) -> torch.Tensor:
        """Return symmetric matrices (..., k, k) on a device."""
        tensor = self.tensors[name]
        return unpack_symmetric(tensor.to(device, non_blocking=tensor.is_pinned()))


def unpacked(stored: StoredFactors, device: torch.device | str) -> dict[str, Factors]:
    """Return projection → factors on a device; of a layer's experts see `expert_factors`."""
    captures = {n: entry for n, entry in stored.captures.items() if n not in stored.experts}
    inputs = {shared: stored.whole(shared, device) for shared, *_ in captures.values()}
    return {
        name: Factors(
            input=inputs[shared],
            output=OutputFactor(blocks=stored.whole(output, device), columns=columns),
        )
        for name, (shared, columns, output) in captures.items()
    }


def pack_symmetric(matrix: torch.Tensor) -> torch.Tensor:
    """Return one half of symmetric matrices (..., k, k), k even, as (..., k/2, k + 1).

    Of the quarters A, B, Bᵀ, C the result holds B, then A's upper triangle beside C's lower one.
    """
    half = matrix.shape[-1] // 2
    packed = torch.empty(*matrix.shape[:-2], half, 2 * half + 1, device=matrix.device)
    packed[..., :half] = matrix[..., :half, half:]
    packed[..., half:] = functional.pad(matrix[..., half:, half:].tril(), (0, 1))
    packed[..., half + 1 :] += matrix[..., :half, :half].triu()
    return packed


def unpack_symmetric(packed: torch.Tensor) -> torch.Tensor:
    """Invert `pack_symmetric`: return matrices fp32 (..., k, k)."""
    half = packed.shape[-2]
    first = packed[..., half + 1 :].triu()
    second = packed[..., half:-1].tril()
    matrix = torch.empty(*packed.shape[:-2], 2 * half, 2 * half, device=packed.device)
    matrix[..., :half, half:] = packed[..., :half]
    matrix[..., half:, :half] = packed[..., :half].mT
    matrix[..., :half, :half] = first + first.triu(1).mT
    matrix[..., half:, half:] = second + second.tril(-1).mT
    return matrix


def factor_bytes(projections: tuple[ProjectionSpec, ...], *, block: int) -> int:
    """Return the approximate size in bytes of one sublayer's factors on disk."""
    inputs = {p.capture: p.in_features**2 for p in projections}
    columns = [padded_columns(p.out_features) for p in projections]
    outputs = sum(n * block_size(n, block) for n in columns)
    return 2 * (sum(inputs.values()) + outputs)  # one half of fp32 matrices


def _split(x: torch.Tensor, number: int, size: int) -> torch.Tensor:
    """Split the columns of (m, n) into blocks (number, m, size), padded with zeros."""
    padded = functional.pad(x, (0, number * size - x.shape[-1]))
    return padded.view(len(x), number, size).transpose(0, 1)
