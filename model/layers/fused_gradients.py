"""Causal attention with gradients in fused kernels: no scores in memory, the same bytes again.

Of torch's kernels, those for fp32 inputs add the gradients of keys and values in any order, and the
ones that store all scores take most of a training's time. Flash attention in fp16 has a repeatable
order; its rounding is what inference has. Gradients are divided by their largest one, because those
of a mean over many tokens are too small for fp16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from exl2flow.model.layers.linear import narrowed

LEAST_GRADIENT = 1e-30  # by which gradients of zero are divided


def knows_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether `attend_with_gradients` serves for queries, keys and values."""
    if not (q.is_cuda and q.dtype == torch.float32):
        return False
    return _knows_flash(q.device, q.shape[1], k.shape[1], q.shape[3], v.shape[3])


def attend_with_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend causally, with gradients for all inputs.

    Args:
        q: queries fp32 (b, heads, t, head_dim).
        k: keys fp32 (b, kv_heads, t, head_dim).
        v: values, shaped as the keys.
        scale: of the scores.

    Returns:
        fp32 (b, heads, t, head_dim).
    """
    attended: torch.Tensor = _Attended.apply(q, k, v, scale)  # type: ignore[no-untyped-call]  # torch's own
    return attended


class _Attended(torch.autograd.Function):
    """Flash attention in fp16, of and for fp32."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        inputs = [narrowed(x) for x in (q, k, v)]
        attended, sums, *rest = flash(*inputs, 0.0, True, scale=scale)
        first_q, first_k, *counts, seed, offset, _ = rest
        ctx.save_for_backward(*inputs, attended, sums, first_q, first_k, seed, offset)
        ctx.counts, ctx.scale = counts, scale
        result: torch.Tensor = attended.float()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        *tensors, seed, offset = ctx.saved_tensors
        largest = grad.abs().amax().clamp_(min=LEAST_GRADIENT)
        with _repeatable():
            found = flash(
                (grad / largest).half(),
                *tensors,
                *ctx.counts,
                0.0,
                True,
                seed,
                offset,
                scale=ctx.scale,
            )
        return *(x.float().mul_(largest) for x in found), None


@contextmanager
def _repeatable() -> Iterator[None]:
    """Ask torch for kernels that add in a fixed order.

    `torch.use_deterministic_algorithms` would import its compiler, which takes seconds.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@cache
def _knows_flash(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, value_dim: int
) -> bool:
    """Return whether flash attention knows such heads and their gradients on a GPU."""
    q, k, v = (
        torch.empty(1, h, 64, dim, dtype=torch.half, device=device, requires_grad=True)
        for h, dim in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    )
    params = SDPAParams(q, k, v, None, 0.0, True, kv_heads < heads)
    return head_dim % 8 == 0 and can_use_flash_attention(params)
