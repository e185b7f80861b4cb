"""Attention by rules that torch's fused attention does not know, a block of queries at a time."""

import torch
from torch.utils.checkpoint import checkpoint

from exl2flow.kernels import AttentionRule

SCORES = 1 << 24  # most scores of a block: 64 MiB


def attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attend causally like `attend`, with fp32 scores; a gradient computes each block again."""
    (batch, heads, count, _), positions = q.shape, k.shape[-2]
    size, before, blocks = max(1, SCORES // (batch * heads * positions)), positions - count, []
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    for begin in range(0, count, size):
        end = min(begin + size, count)
        first = _first_seen(before + begin, rule)
        keys, values = (x[:, :, first : before + end] for x in (k, v))
        part = (q[:, :, begin:end], keys, values, rule, before + begin - first)
        if needs_gradient:
            # the random state of a GPU would be waited for
            block = checkpoint(_block, *part, use_reentrant=False, preserve_rng_state=False)
            blocks.append(block)
        else:
            blocks.append(_block(*part))
    return torch.cat(blocks, dim=2)


def _first_seen(position: int, rule: AttentionRule) -> int:
    """Return a position before which no query from this one on sees a key; with chunks, of one."""
    if rule.chunk is not None:
        return position - position % rule.chunk
    return 0 if rule.window is None else max(0, position + 1 - rule.window)


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule, first: int
) -> torch.Tensor:
    """Attend with queries (b, heads, n, d) whose positions among the keys begin at `first`."""
    (batch, heads, count, dim), (kv_heads, positions) = q.shape, k.shape[1:3]
    queries = torch.arange(first, first + count, device=q.device)
    visible = rule.visible(queries, torch.arange(positions, device=q.device))
    rows = q.reshape(batch * kv_heads, -1, dim)  # heads of a group, one after another
    products = _products(rows, k.reshape(-1, positions, dim).mT)
    weights = rule.weights(products.view(batch, heads, count, positions), visible)
    exact = torch.float32 if not q.is_cuda else q.dtype
    values = v.reshape(-1, positions, v.shape[-1]).to(exact)
    attended = weights.to(exact).view(len(rows), -1, positions) @ values
    return attended.view(batch, heads, count, -1).to(q.dtype)


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return q k in fp32; on a GPU from tensor cores where no gradient is needed."""
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if q.is_cuda and q.dtype != torch.float32 and not needs_gradient:
        return torch.bmm(q, k, out_dtype=torch.float32)
    return q.float() @ k.float()
