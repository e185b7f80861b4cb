"""The steps between products on a GPU: kernels for fp16 without gradients."""

import numpy as np
import torch

from exl2flow.kernels.cuda.compiler import NORM_PIECES, THREADS, launch, whole_warps
from exl2flow.kernels.interface.cache_formats import PAGE_TOKENS
from exl2flow.kernels.interface.norm import NormArgs
from exl2flow.kernels.reference import steps as torch_steps

STEP_THREADS, NORM_THREADS = 256, 512
MOST_THREADS = 1024  # per CTA
MOST_ROWS = 65535  # of a grid's second axis
WIDE = 8  # numbers in 16 bytes


def norm(x: torch.Tensor, by: NormArgs) -> torch.Tensor:
    """See `Ops.norm`."""
    if not _is_plain(*(tensor for tensor in (x, by.weight, by.bias) if tensor is not None)):
        return torch_steps.norm(x, by)
    if not by.is_plain:
        return add_normed(x, by, None)
    x, y = _with_room(x)
    d, of_row = x.shape[-1], whole_warps(-(-x.shape[-1] // (WIDE * NORM_PIECES)))
    if not _is_wide(d, x, by.weight) or of_row > MOST_THREADS:
        return add_normed(x, by, None)
    rows, threads = x.numel() // d, THREADS if of_row == 32 else of_row
    where, eps = (x.data_ptr(), by.weight, y.data_ptr()), np.float32(by.eps)
    _launch("rms_norm_8", rows * of_row, *where, rows, d // WIDE, eps, of_row, threads=threads)
    return y


def add_normed(
    x: torch.Tensor, by: NormArgs, hidden: torch.Tensor | None, multiplier: float = 1.0
) -> torch.Tensor:
    """Return hidden + norm(x) · multiplier for rows fp16 (…, d), added in fp32.

    Without hidden rows, which are (r, d), return norm(x) · multiplier.
    """
    x, y = _with_room(x)
    d, heads, head_step = x.shape[-1], 1, 1
    if by.weight.dim() == 2:  # the head of a row follows from its place in memory
        heads, head_step = x.shape[-3], max(1, x.stride(-3) // d)
    threads = min(NORM_THREADS, whole_warps(d))
    _launch(
        "add_normed",
        x.numel() // d * threads,
        *(x.data_ptr(), by.weight, 0 if by.bias is None else by.bias),
        *(0 if hidden is None else hidden.contiguous(), y.data_ptr()),
        *(d, heads, head_step, int(by.centered), np.float32(by.eps), np.float32(multiplier)),
        threads=threads,
    )
    return y


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `Ops.rotate`."""
    half = cos.shape[-1]
    if not half or not _is_plain(x) or x.stride(-1) != 1:
        return torch_steps.rotate(x, cos, sin)
    y = torch.empty_like(x)  # its axes in memory are ordered as those of x
    b, heads, t, head_dim = x.shape
    of_row, steps = cos.stride(0) if cos.dim() == 4 else 0, (*x.stride()[:3], *y.stride()[:3])
    is_wide = _is_wide(half, x, cos, sin) and all(n % WIDE == 0 for n in (head_dim, *steps))
    width = WIDE if is_wide else 1
    units = heads * (head_dim - half) // width  # pairs, and elements that are not rotated
    threads = min(STEP_THREADS, whole_warps(units))
    launch(
        "elementwise.cu",
        f"rotate_{width}",
        (t, -(-units // threads), b),
        *(x.data_ptr(), cos, sin, y.data_ptr()),
        *(heads, head_dim, half, *steps, of_row, cos.stride(-2)),
        threads=threads,
    )
    return y


def embed(ids: torch.Tensor, table: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
    """See `Ops.embed`."""
    rows, d = table.shape
    is_known = _is_plain(table) and _is_wide(d, table) and ids.dim() == 2 and ids.stride(1) == 1
    if not is_known or not ids.numel():
        return torch_steps.embed(ids, table, multiplier)
    y, pieces = table.new_empty(*ids.shape, d), d // WIDE
    threads = min(STEP_THREADS, whole_warps(pieces))
    launch(
        "elementwise.cu",
        "embed",
        (ids.numel(), -(-pieces // threads)),
        *(ids.data_ptr(), table, y, ids.shape[1], ids.stride(0), rows, pieces),
        np.float32(multiplier),
        threads=threads,
    )
    return y


def next_slots(
    tables: torch.Tensor, lengths: torch.Tensor, count: int, page_tokens: int = PAGE_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.next_slots`."""
    assert page_tokens == PAGE_TOKENS  # `check_pages` refused others
    batch, pages = tables.shape
    positions, slots = torch.empty(2, batch, count, dtype=torch.int64, device=tables.device)
    places = (tables.contiguous(), lengths, positions, slots)
    _launch("next_slots", batch * count, *places, batch * count, count, pages)
    return positions, slots


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `Ops.gated`."""
    if not _is_plain(gate, up) or gate.shape != up.shape:
        return torch_steps.gated(gate, up, activation)
    rows, step = len(gate), gate.stride(0)
    is_beside = gate.dim() == 2 and gate.stride() == up.stride() == (step, 1) and rows <= MOST_ROWS
    if not is_beside or gate.is_contiguous():
        gate, up = gate.contiguous(), up.contiguous()
        rows, step = 1, gate.numel()
    y, each = torch.empty_like(gate, memory_format=torch.contiguous_format), gate.numel() // rows
    width = WIDE if _is_wide(each, gate, up) and step % WIDE == 0 else 1
    name, count = f"gated_{activation}_{width}", each // width
    _launch(name, count, gate.data_ptr(), up.data_ptr(), y, count, step // width, rows=(rows,))
    return y


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See `Ops.activated`."""
    if not _is_plain(x):
        return torch_steps.activated(x, activation)
    x = x.contiguous()
    y, width = torch.empty_like(x), WIDE if _is_wide(x.numel(), x) else 1
    count = x.numel() // width
    _launch(f"activated_{activation}_{width}", count, x, y, count)
    return y


def joined(
    a: torch.Tensor, b: torch.Tensor, a_sums: torch.Tensor, b_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.joined`."""
    (rows, heads, t, head_dim), y = a.shape, torch.empty_like(a)
    in_order, strides = a.transpose(1, 2), y.stride()
    is_plain = _is_plain(a, b) and in_order.is_contiguous() and a.stride() == b.stride() == strides
    if rows != 1 or not is_plain or not _is_wide(head_dim, a, b):
        return torch_steps.joined(a, b, a_sums, b_sums)
    sums = torch.empty_like(a_sums, memory_format=torch.contiguous_format)
    _launch(
        "joined",
        a.numel() // WIDE,
        *(in_order, b.data_ptr(), a_sums.contiguous(), b_sums.contiguous()),
        *(y.data_ptr(), sums, t, heads, head_dim // WIDE),
    )
    return y, sums


def _launch(
    name: str,
    count: int,
    *arguments: torch.Tensor | int | np.generic,
    threads: int = STEP_THREADS,
    rows: tuple[int, ...] = (),
) -> None:
    """Launch a kernel of elementwise.cu for `count` threads, of each of `rows` if it has any."""
    launch("elementwise.cu", name, (-(-count // threads), *rows), *arguments, threads=threads)


def _is_plain(*tensors: torch.Tensor) -> bool:
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    is_half = all(x.dtype == torch.float16 and x.numel() > 0 for x in tensors)
    return is_half and not needs_gradient


def _with_room(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and a result with its strides; x is copied unless whole rows fill its memory."""
    y = torch.empty_like(x)
    if x.stride(-1) == 1 and y.stride() == x.stride():
        return x, y
    return x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)


def _is_wide(d: int, *tensors: torch.Tensor) -> bool:
    """Return whether rows of d numbers and the tensors' addresses are multiples of 16 bytes."""
    return d % WIDE == 0 and all(x.data_ptr() % 16 == 0 for x in tensors)
