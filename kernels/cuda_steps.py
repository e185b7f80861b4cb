"""Between the products of a decoding step, on a GPU: kernels for fp16 without gradients."""

import torch

from exl2flow.kernels.compiler import launch
from exl2flow.kernels.ops import device_table
from exl2flow.kernels.streams import kept, sent
from exl2flow.kernels.torch_ops import TORCH_OPS

NORM_THREADS = 512
ROTATE_THREADS = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Ops.rms_norm`."""
    if not _is_plain(x, weight):
        return TORCH_OPS.rms_norm(x, weight, eps)
    x = x.contiguous()
    y, d = torch.empty_like(x), x.shape[-1]
    threads = min(NORM_THREADS, -(-d // 32) * 32)
    argument = _number(eps, x.device)
    launch(
        "elementwise.cu", "rms_norm", (x.numel() // d,), x, weight, y, d, argument, threads=threads
    )
    return y


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `Ops.rotate`."""
    if not _is_plain(x) or x.stride(-1) != 1:
        return TORCH_OPS.rotate(x, cos, sin)
    y = torch.empty_like(x)
    b, heads, t, head_dim = x.shape
    if y.stride() != x.stride():  # x has gaps
        return TORCH_OPS.rotate(x, cos, sin)
    of_row = cos.stride(0) if cos.dim() == 4 else 0
    shape = (t, head_dim, cos.shape[-1], *x.stride()[:3], of_row, cos.stride(-2), heads)
    launch(
        "elementwise.cu", "rotate", (b * heads * t,),
        x.data_ptr(), cos, sin, y.data_ptr(), device_table(shape, x.device),
        threads=ROTATE_THREADS,
    )  # fmt: skip
    return y


def _is_plain(*tensors: torch.Tensor) -> bool:
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    is_half = all(x.dtype == torch.float16 and x.numel() > 0 for x in tensors)
    return is_half and not needs_gradient


@kept
def _number(value: float, device: torch.device) -> torch.Tensor:
    return sent(torch.tensor([value], dtype=torch.float32), device)
