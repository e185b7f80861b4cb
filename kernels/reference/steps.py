"""The torch implementation of the steps between products: the specification of `cuda/steps.py`."""

import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS, GATED_ACTIVATIONS
from exl2flow.kernels.interface.cache_formats import PAGE_TOKENS, slots_at
from exl2flow.kernels.interface.norm import NormArgs
from exl2flow.kernels.streams import device_table


def norm(x: torch.Tensor, by: NormArgs) -> torch.Tensor:
    """Normalize x (…, d), or (…, heads, t, d) with weights of heads; see `NormArgs`."""
    wide = x.float()
    if by.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + by.eps)
    y = normed.to(x.dtype) * _by_head(by.weight)
    return y if by.bias is None else y + _by_head(by.bias)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) · up, each rounded to their dtype; the activation by name.

    One of `GATED_ACTIVATIONS` says itself what it does with up.
    """
    of_both = GATED_ACTIVATIONS.get(activation)
    return ACTIVATIONS[activation](gate) * up if of_both is None else of_both(gate, up)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(x); the activation by name."""
    return ACTIVATIONS[activation](x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + d/2) of each head's first d dimensions, in fp32.

    Args:
        x: (b, h, t, head_dim).
        cos: fp32 (t, d/2) or (b, 1, t, d/2).
        sin: of the same shape. Without any columns, x is returned as it is.

    Returns:
        Rotated x, in its shape and dtype.
    """
    half = cos.shape[-1]
    if not half:
        return x
    wide = x[..., : 2 * half].float()
    first, second = wide[..., :half], wide[..., half:]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    rest = x[..., 2 * half :]
    y = rotated.to(x.dtype)
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


def embed(ids: torch.Tensor, table: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
    """Return rows of a table times a multiplier, (…, d) in the table's dtype.

    Args:
        ids: int64 (…); one without a row counts as 0.
        table: (rows, d).
        multiplier: of the rows.
    """
    is_known = (ids >= 0) & (ids < len(table))
    rows = table[torch.where(is_known, ids, 0)]
    return rows if multiplier == 1.0 else rows * multiplier


def next_slots(
    tables: torch.Tensor, lengths: torch.Tensor, count: int, page_tokens: int = PAGE_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of `count` new tokens of each text, and their slots, int64 (b, count).

    Args:
        tables: int32 (b, pages), the pages of each text.
        lengths: int32 (b,), its positions so far.
        count: tokens.
        page_tokens: of a page.
    """
    positions = lengths.long()[:, None] + torch.arange(count, device=lengths.device)
    return positions, slots_at(tables, positions, page_tokens)


def joined(
    a: torch.Tensor, b: torch.Tensor, a_sums: torch.Tensor, b_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to two sets of positions from attention to each, and the sums.

    Args:
        a: what queries (b, h, t, head_dim) find among the first ones.
        b: among the second ones.
        a_sums: logarithms of the sums of exp(score), fp32 (b, h, t).
        b_sums: of the second ones.
    """
    share = torch.sigmoid(b_sums - a_sums)[..., None]
    attended = torch.lerp(a.float(), b.float(), share).to(a.dtype)
    return attended, torch.logaddexp(a_sums, b_sums)


def halved(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Bring the pairs (2i, 2i + 1) of the first `dim` elements of heads to (i, i + dim/2).

    x: (b, h, t, head_dim), as a transpose of (b, t, h, head_dim); so is the result.
    """
    order = (*range(0, dim, 2), *range(1, dim, 2), *range(dim, x.shape[-1]))
    return x.transpose(1, 2).index_select(-1, device_table(order, x.device)).transpose(1, 2)


def _by_head(weight: torch.Tensor) -> torch.Tensor:
    """Return weights (d,), or (heads, 1, d) where each head has its own."""
    return weight if weight.dim() == 1 else weight[:, None]
