"""Attention over grouped heads: the half-layer."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from exl2flow.kernels import AttentionRule, get_ops
from exl2flow.model.config.family import HeadNorms
from exl2flow.model.config.spec import AttentionSpec
from exl2flow.model.config.sublayer_spec import SublayerSpec
from exl2flow.model.layers.blockwise import attend_in_blocks
from exl2flow.model.layers.cache import LayerCache
from exl2flow.model.layers.fuse import Products, product_of
from exl2flow.model.layers.fused_gradients import attend_with_gradients, knows_gradients
from exl2flow.model.layers.linear import Linear, narrowed
from exl2flow.model.layers.norms import Norm
from exl2flow.model.layers.rope import RopeTable, rope_table
from exl2flow.model.layers.sublayer import Sublayer

COMMON_TOKENS = 256  # cuDNN keeps a plan of 1.4 MB per shape: for texts of multiples of this only
FAR_STEP, NEAR_STEP = 2048, 1024  # as above, for a piece of a prompt: of positions, of its tokens
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Outputs of the q, k and v projections, before norms and rotation: (b, t, heads · dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class AttentionSublayer(Sublayer):
    """A `Sublayer`; `project` and `attend` are the two halves of what `reads` computes."""

    def __init__(
        self,
        spec: SublayerSpec,
        *,
        attention: AttentionSpec,
        norms: dict[str, Norm],
        linears: dict[str, Linear],
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(spec, norms=norms, linears=linears, multiplier=multiplier)
        self.attention = attention
        self.captures = spec.projection("q").capture, spec.projection("o").capture

    def reads(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what q, k and v read, and the attention output that o reads."""
        first, last = self.captures
        x = self.normed("before", hidden)
        return {first: x, last: self.attend(self.project(x), start=start, cache=cache)}

    def project(self, x: torch.Tensor) -> Projected:
        """Apply the q, k and v projections."""
        q, k, v = self.apply_linears(self.captures[0], x)
        return Projected(q=q, k=k, v=v)

    def attend(
        self,
        projected: Projected,
        *,
        start: int | RopeTable = 0,
        cache: LayerCache | None = None,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output (b, t, heads · dim) of given projection outputs.

        to: as in `LayerCache.attend`; only with a cache.
        """
        projected, gate = self._ungated(projected)
        q, k, v, table = self._inputs(projected, start, with_cache=cache is not None)
        rule = self.attention.rule
        if cache is None:
            result = attend(q, k, v, rule)  # (b, h, t, d)
        elif to is None:
            result = cache.attend(q, k, v, table=table, rule=rule)
        else:
            result = cache.attend(q, k, v, table=table, rule=rule, to=to)
        flat = result.transpose(1, 2).flatten(2).to(projected.q.dtype)
        return flat if gate is None else flat * reordered(gate, to).sigmoid()

    def _ungated(self, projected: Projected) -> tuple[Projected, torch.Tensor | None]:
        """Return projections without gates' logits, and these, (b, t, heads · dim) or None."""
        if not self.attention.has_gate:
            return projected, None
        batch, count, _ = projected.q.shape
        by_head = projected.q.view(batch, count, self.attention.num_heads, 2, -1)
        q, gate = (part.flatten(-2) for part in by_head.unbind(-2))
        return replace(projected, q=q), gate

    def between(
        self,
        outputs: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        *,
        start: int | RopeTable = 0,
        cache: LayerCache | None = None,
        to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what o reads, (b, t, heads · dim), of the outputs of q, k and v.

        hidden: what entered the sublayer, (b, t, hidden); to: see `attend`.
        """
        return self.attend(_projected(outputs), start=start, cache=cache, to=to)

    def keep(
        self,
        outputs: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        *,
        start: int | RopeTable,
        cache: LayerCache,
    ) -> None:
        """Add the keys and values of outputs to a cache; arguments as in `between`."""
        self.store(_projected(outputs), start=start, cache=cache)

    def store(self, projected: Projected, *, start: int | RopeTable, cache: LayerCache) -> None:
        """Add the keys and values of given projection outputs to a cache."""
        _, k, v, table = self._inputs(self._ungated(projected)[0], start, with_cache=True)
        cache.store(k, v, table=table)

    def fill(self, hidden: torch.Tensor, *, start: int | RopeTable, cache: LayerCache) -> None:
        """Add the keys and values of hidden states (b, t, hidden) to a cache."""
        self.store(self.project(self.normed("before", hidden)), start=start, cache=cache)

    def _inputs(
        self, projected: Projected, start: int | RopeTable, *, with_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RopeTable]:
        """Return queries, keys and values (b, h, t, d), and the rotation that is left."""
        q, k, v = projected.q, projected.k, projected.v
        if self.attention.head_norms is HeadNorms.WHOLE:
            q, k = self.normed("q", q), self.normed("k", k)
        if (most := self.attention.clip) is not None:
            q, k, v = (x.clamp(-most, most) for x in (q, k, v))
        q, k, v = (self._heads(x) for x in (q, k, v))
        if isinstance(start, RopeTable):
            table = start
        else:
            table = rope_table(self.attention.rope, start, q.shape[-2], q.device)
        q, k, table = self._positioned(q, k, table, with_cache=with_cache)
        if next(iter(self.norms.values())).weight.dtype == torch.float16:
            q, k, v = narrowed(q), narrowed(k), narrowed(v)
        return q, k, v, table

    def products(self) -> Products:
        """See `Sublayer.products`."""
        first = product_of(self.with_roles("q", "k", "v"), norm=self.norms.get("before"))
        return first, self.residual_product("o")

    def _positioned(
        self, q: torch.Tensor, k: torch.Tensor, table: RopeTable, *, with_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor, RopeTable]:
        """Normalize and rotate queries and keys; return what is left for a cache to rotate."""
        is_last = self.attention.norm_after_rope
        of_heads = self.attention.head_norms is not HeadNorms.WHOLE
        if of_heads and not is_last:
            q, k = self.normed("q", q), self.normed("k", k)
        scale = table.query_scale
        if is_last or not with_cache:
            q, k, table = table.rotate(q), table.rotate(k), table.without_rotation()
        if of_heads and is_last:
            q, k = self.normed("q", q), self.normed("k", k)
        if scale is not None:
            q, table = (q * scale).to(q.dtype), replace(table, query_scale=None)
        return q, k, table

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Split (b, t, h · d) into (b, h, t, d)."""
        batch, count, _ = x.shape
        return x.view(batch, count, -1, self.attention.head_dim).transpose(1, 2)


def _projected(outputs: Sequence[torch.Tensor]) -> Projected:
    q, k, v = outputs
    return Projected(q=q, k=k, v=v)


def reordered(y: torch.Tensor, to: torch.Tensor | None) -> torch.Tensor:
    """Return elements (…, n) where `to` int32 (n,) says they go; None: in order."""
    return y if to is None else torch.empty_like(y).index_copy_(-1, to.long(), y)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Attend causally; the last query stands at the position of the last key.

    Args:
        q: queries (b, heads, t, head_dim).
        k: keys (b, kv_heads, positions, head_dim), `positions` at least `t`.
        v: values, shaped as the keys.
        rule: what happens to the scores; fused kernels know no soft-cap.

    Returns:
        (b, heads, t, head_dim).
    """
    if not rule.is_fused:
        return attend_in_blocks(q, k, v, rule)
    first = 0 if rule.chunk is None else (k.shape[-2] - q.shape[-2]) // rule.chunk * rule.chunk
    if first:  # no query sees an earlier chunk
        k, v = k[:, :, first:], v[:, :, first:]
    count, positions = q.shape[-2], k.shape[-2]
    far = _far(q, k, rule)
    if far:
        return _attend_apart(q, k, v, rule.scale, far)
    is_windowed = any(n is not None and positions > n for n in (rule.window, rule.chunk))
    is_causal = count == positions and not is_windowed
    mask = None
    if is_windowed or (1 < count < positions and not q.is_cuda):
        keys = torch.arange(positions, device=q.device)
        mask = rule.visible(keys[positions - count :], keys)
    elif 1 < count < positions:  # the fused kernels know this one by name
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler: 2 s

        mask = causal_lower_right(count, positions)
    with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if with_gradients and is_causal and knows_gradients(q, k, v):
        return attend_with_gradients(q, k, v, rule.scale)
    if q.is_cuda and q.dtype == torch.float32:  # its fused kernels know no groups of heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    is_common = count == positions and count % COMMON_TOKENS == 0
    kernels = [SDPBackend.MATH] if with_gradients else [] if is_common else WITHOUT_PLANS
    with sdpa_kernel(kernels) if kernels and q.is_cuda else nullcontext():
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=rule.scale,
            enable_gqa=k.shape[1] < q.shape[1],
        )


def _far(q: torch.Tensor, k: torch.Tensor, rule: AttentionRule) -> int:
    """Return how many of the first positions are attended to separately; 0: none.

    cuDNN is twice as fast as the other fused kernels, but knows no queries that begin behind the
    first key: what all of them see is left to it.
    """
    count, positions = q.shape[-2], k.shape[-2]
    far = (positions - count) // FAR_STEP * FAR_STEP
    sees_all = all(n is None or n >= positions for n in (rule.window, rule.chunk))
    if not (far and sees_all and count % NEAR_STEP == 0 and q.is_cuda) or torch.is_grad_enabled():
        return 0
    return far if _knows_cudnn(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3]) else 0


@cache
def _knows_cudnn(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> bool:
    """Return whether cuDNN can attend with such heads."""
    q, k = (torch.empty(1, h, 64, head_dim, dtype=dtype, device=device) for h in (heads, kv_heads))
    params = SDPAParams(q, k, k, None, 0.0, False, kv_heads < heads)
    return can_use_cudnn_attention(params)


def _attend_apart(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, far: int
) -> torch.Tensor:
    """Attend to the first `far` positions, which all queries see, and causally to the others."""
    ops, near = get_ops(q.device), (k[:, :, far:], v[:, :, far:])
    if near[0].shape[2] == q.shape[2]:
        attended, sums = _by_cudnn(q, *near, scale, is_causal=True)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        attended, sums = flash(q, *near, 0.0, True, False, scale=scale)[:2]
    for begin, end in _stretches(far):
        of_these = k[:, :, begin:end], v[:, :, begin:end]
        other, other_sums = _by_cudnn(q, *of_these, scale, is_causal=False)
        attended, sums = ops.joined(attended, other, sums, other_sums)
    return attended


def _by_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and the logarithms of the sums of exp(score), fp32 (b, h, t)."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    attended, sums, *_ = cudnn(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return attended, sums.view(q.shape[:3])


def _stretches(far: int) -> Iterator[tuple[int, int]]:
    """Divide positions into lengths of powers of two, the longest first: of few shapes."""
    begin = 0
    while begin < far:
        length = 1 << ((far - begin).bit_length() - 1)
        yield begin, begin + length
        begin += length
