"""Between the products of a decoding step, on a GPU: kernels for fp16 without gradients."""

import numpy as np
import torch

from exl2flow.kernels import torch_steps
from exl2flow.kernels.compiler import THREADS, launch
from exl2flow.kernels.ops import FEW_ROWS

NORM_THREADS = 512
ROTATE_THREADS = 64
MOST_ROW = 48 << 10  # bytes that a CTA has in shared memory on any device


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Ops.rms_norm`."""
    if not _is_plain(x, weight):
        return torch_steps.rms_norm(x, weight, eps)
    x = x.contiguous()
    y, d = torch.empty_like(x), x.shape[-1]
    threads = min(NORM_THREADS, -(-d // 32) * 32)
    launch(
        "elementwise.cu", "rms_norm", (x.numel() // d,), x, weight, y, d, np.float32(eps),
        threads=threads, early=True,
    )  # fmt: skip
    return y


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `Ops.rotate`."""
    if not _is_plain(x) or x.stride(-1) != 1:
        return torch_steps.rotate(x, cos, sin)
    y = torch.empty_like(x)
    b, heads, t, head_dim = x.shape
    if y.stride() != x.stride():  # x has gaps
        return torch_steps.rotate(x, cos, sin)
    of_row = cos.stride(0) if cos.dim() == 4 else 0
    launch(
        "elementwise.cu", "rotate", (b * heads * t,),
        x.data_ptr(), cos, sin, y.data_ptr(), heads, t, head_dim, cos.shape[-1], *x.stride()[:3],
        of_row, cos.stride(-2), threads=ROTATE_THREADS, early=True,
    )  # fmt: skip
    return y


def reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """See `Ops.reordered`."""
    if not _is_plain(x) or not x.is_contiguous():
        return torch_steps.reordered(x, order)
    y, d = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // d
    if rows <= FEW_ROWS or d % 8 or 2 * d > MOST_ROW:
        grid = (rows, -(-d // THREADS))
        launch("elementwise.cu", "reorder", grid, x, order, y, d, early=True)
    else:
        launch(
            "elementwise.cu", "reorder_rows", (-(-rows // FEW_ROWS),),
            x, order, y, rows, d, FEW_ROWS, threads=NORM_THREADS, shared=2 * d, early=True,
        )  # fmt: skip
    return y


def _is_plain(*tensors: torch.Tensor) -> bool:
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    is_half = all(x.dtype == torch.float16 and x.numel() > 0 for x in tensors)
    return is_half and not needs_gradient
