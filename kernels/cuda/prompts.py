"""Linears at large batch size (prefill): dequantize to fp16, multiply with cuBLAS."""

from collections.abc import Sequence
from itertools import groupby
from weakref import WeakKeyDictionary

import numpy as np
import torch

from exl2flow.kernels.cuda.compiler import DECODE_TILES, DECODE_WARPS, launch
from exl2flow.kernels.cuda.packing import laid_table
from exl2flow.kernels.cuda.steps import activated, add_normed, gated, norm
from exl2flow.kernels.interface.groups import PANEL_ROWS
from exl2flow.kernels.interface.packed import MOST_BESIDE, TILE, FusedLinear, PackedMatrix
from exl2flow.kernels.plans.product import MOST_MATRICES
from exl2flow.kernels.plans.sources import filled, struct

WORK = struct("decode.cu", "Work", MOST_MATRICES=MOST_MATRICES)


def multiply(
    x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """See `Ops.multiply`."""
    results, is_own = [x], False  # whether the hidden state was made here
    beside: list[torch.Tensor] = []
    for p in products:
        x = p.in_natural_order(results[0])
        x = x if p.norm is None else norm(x, p.norm)
        is_plain = p.after is None and p.activation is None and p.matrices[0].bias is None
        if hidden is not None and p.adds and is_plain:  # cuBLAS adds it
            weight = _decoded(p.matrices)
            if is_own:
                hidden.addmm_(x, weight, alpha=p.multiplier)
            else:
                hidden = torch.addmm(hidden, x, weight, alpha=p.multiplier)
            del weight  # before the next one is decoded: it may have half a gigabyte
            results = [hidden]
        else:
            y = _results(x, p.main, exact=p.exact)
            results = finished(p, _activated(p, y), hidden if p.adds else None)
            hidden = results[0] if p.adds else hidden
            beside += _results(x, p.beside, exact=p.exact)
        is_own = is_own or p.adds
    return [*results, *beside], results[0] if hidden is None else hidden


def decode_packed(matrix: PackedMatrix) -> torch.Tensor:
    """See `Ops.decode_packed`."""
    return _decoded([matrix])


def _results(
    x: torch.Tensor, matrices: tuple[PackedMatrix, ...], *, exact: bool
) -> list[torch.Tensor]:
    """Return x Q + bias of each matrix; those of several may be columns of one tensor."""
    results: list[torch.Tensor] = []
    decoded_bytes = 2 * x.shape[1] * sum(map(_width, matrices))
    for together in [matrices] if 0 < decoded_bytes <= MOST_BESIDE else zip(matrices):
        weight = _decoded(together)
        y = torch.mm(x, weight, out_dtype=torch.float32) if exact else x @ weight
        del weight  # as above
        begin = 0
        for matrix in together:
            results.append(y[:, begin : begin + matrix.columns])
            begin += _width(matrix)
    return [
        y if matrix.bias is None else y + matrix.bias
        for y, matrix in zip(results, matrices, strict=True)
    ]


def _activated(p: FusedLinear, results: list[torch.Tensor]) -> list[torch.Tensor]:
    if p.activation is None:
        return results
    first, *up = results
    return [gated(first, up[0], p.activation) if up else activated(first, p.activation)]


def finished(
    p: FusedLinear, results: list[torch.Tensor], hidden: torch.Tensor | None
) -> list[torch.Tensor]:
    """Apply what follows a product and its activation; add the result to hidden states, if any."""
    if p.after is not None:
        return [add_normed(y, p.after, hidden, p.multiplier) for y in results]
    results = results if p.multiplier == 1.0 else [y * p.multiplier for y in results]
    return results if hidden is None else [results[0] + hidden]


# by the first matrix and the others, which are held so that no later ones get their addresses
_WORKS: WeakKeyDictionary[PackedMatrix, dict[tuple[PackedMatrix, ...], list["_Work"]]] = (
    WeakKeyDictionary()
)


def _decoded(matrices: Sequence[PackedMatrix]) -> torch.Tensor:
    """Return matrices side by side as fp16 (k, columns); padding columns lie between them."""
    first, *others = matrices
    works = _WORKS.setdefault(first, {})
    key = tuple(others)
    if key not in works:
        works[key] = _works(matrices)
    rows, width, device = len(first.order), sum(map(_width, matrices)), first.words.device
    room = torch.empty(rows, width, dtype=torch.float16, device=device)
    for name, grid, work in works[key]:
        call = filled(work.copy(), y=room)
        launch("decode.cu", name, grid, call, threads=32 * DECODE_WARPS, device=device)
    last = matrices[-1]
    return room[:, : width - _width(last) + last.columns]


_Work = tuple[str, tuple[int, int], np.void]  # of a launch: the function, the grid, the argument


def _works(matrices: Sequence[PackedMatrix]) -> list[_Work]:
    """Return the launches that decode matrices: one, unless their forms differ."""
    launches: list[_Work] = []
    column, width = 0, sum(map(_width, matrices))
    for has_zeros, alike in groupby(matrices, lambda matrix: matrix.has_zeros):
        work = filled(np.zeros(1, WORK)[0], step=width)
        ctas = count = 0
        for matrix in alike:
            tiles, length = matrix.words.shape
            filled(
                work["of"][count],
                words=matrix.words,
                table=laid_table(matrix.groups, matrix.scale_words, matrix.words.device),
                order=matrix.order,
                tile_bytes=4 * length,
                tiles=tiles,
                column=column,
                first=ctas,
            )
            column, count = column + TILE * tiles, count + 1
            ctas += -(-tiles // (DECODE_WARPS * DECODE_TILES))
        work["count"] = count
        panels = len(matrices[0].order) // PANEL_ROWS
        launches.append(("decode_gptq" if has_zeros else "decode_exl2", (ctas, panels), work))
    return launches


def _width(matrix: PackedMatrix) -> int:
    return TILE * len(matrix.words)
