"""The torch implementation of the cache operations: the reference for every kernel."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from exl2flow.kernels.interface.attention_rule import AttentionRule
from exl2flow.kernels.interface.cache_formats import (
    LARGEST_HALF,
    RUN,
    UNIT,
    CacheRows,
    Element,
    LayerStore,
    StepCache,
    padded_width,
    slots_of,
)
from exl2flow.kernels.reference.steps import halved, rotate
from exl2flow.kernels.streams import device_cache, sent


def check_pages(page_tokens: int) -> None:
    """Raise `ConfigError` if pages of a cache cannot have this many tokens."""


def encode(element: Element, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored form of rows (t, width): uint8 (t, bytes), scales fp16 (t, runs)."""
    x = x.float() if element is Element.FULL else x.half()
    x = functional.pad(x, (0, padded_width(x.shape[-1]) - x.shape[-1]))
    none = x.new_empty(len(x), 0, dtype=torch.float16)
    if element in (Element.HALF, Element.FULL):
        return x.contiguous().view(torch.uint8), none
    if element is Element.UPPER_BYTE:
        return (x.view(torch.int16) >> 8).to(torch.uint8), none
    runs = _rotated(x).view(len(x), x.shape[1] // RUN, RUN)
    center = 1 << (element.bits - 1)
    largest = runs.abs().amax(-1, keepdim=True).clamp(max=LARGEST_HALF * element.steps)
    codes = torch.where(largest > 0, runs / largest, 0.0) * center + center
    codes = codes.round().clamp(0, 2 * center - 1).to(torch.uint8).flatten(1)
    if element is Element.ROTATED_4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    if element is Element.ROTATED_6:
        codes = _in_six_bits(codes)
    return codes, (largest[..., 0] / element.steps).half()


def _in_six_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes, uint8 (t, width), in the bytes (t, 3 / 4 width) that `codes_of` reads."""
    first, second, third, fourth = codes.view(
        len(codes), codes.shape[1] // UNIT, 4, UNIT // 4
    ).unbind(2)
    upper = [(a >> 2 << 4) | (b >> 2) for a, b in ((first, second), (third, fourth))]
    lower = (first & 3) | (second & 3) << 2 | (third & 3) << 4 | (fourth & 3) << 6
    return torch.stack([*upper, lower], dim=2).flatten(1)


def codes_of(element: Element, data: torch.Tensor) -> torch.Tensor:
    """Return the codes of stored rows, uint8 (t, width).

    Of a unit in 6 bits, 16 bytes have the four upper bits of a first and a second quarter, 16 those
    of the others, and 16 the two lower bits of all four.
    """
    if element is Element.ROTATED_8:
        return data
    if element is Element.ROTATED_4:
        return torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
    early, late, lower = data.view(len(data), 4 * data.shape[1] // (3 * UNIT), 3, UNIT // 4).unbind(
        2
    )
    upper = (early >> 4, early & 15, late >> 4, late & 15)
    quarters = [part << 2 | (lower >> 2 * i) & 3 for i, part in enumerate(upper)]
    return torch.stack(quarters, dim=2).flatten(1)


def decode(rows: CacheRows, slots: torch.Tensor | slice) -> torch.Tensor:
    """Return the rows at slots, int64 (t,) or a slice, as fp16 (t, width); fp32 if they are."""
    data, element = rows.data[slots], rows.element
    if element in (Element.HALF, Element.FULL):
        dtype = torch.float16 if element is Element.HALF else torch.float32
        return data.view(dtype)[:, : rows.width]
    if element is Element.UPPER_BYTE:
        return (data.to(torch.int16) << 8).view(torch.float16)[:, : rows.width]
    codes = codes_of(element, data)
    center = 1 << (element.bits - 1)
    runs = codes.view(len(data), codes.shape[1] // RUN, RUN).float() - center
    scales = rows.scales[slots].float() * (element.steps // center)
    values = (runs * scales[..., None]).flatten(1)
    return (_rotated(values) / RUN)[:, : rows.width].half()


def write_cache(store: LayerStore, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store keys and values in the format of the cache.

    Args:
        store: the cache of one layer.
        slots: int64 (t,), the destinations, without duplicates.
        k: rotated keys (t, kv_heads, head_dim), rounded to fp16 here.
        v: values of the same shape.
    """
    for rows, x in ((store.keys, k), (store.values, v)):
        data, scales = encode(rows.element, x.reshape(len(slots), rows.width))
        rows.data[slots], rows.scales[slots] = data, scales


def read_cache(store: LayerStore, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values at slots int64 (t,), each fp16 (t, kv_heads, head_dim).

    Those of a slice that are stored as they are returned are not copied.
    """
    shape = (-1, store.kv_heads, store.head_dim)
    return decode(store.keys, slots).view(shape), decode(store.values, slots).view(shape)


def get_page(tables: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """Return row `index` of every table, uint8 (rows, bytes) with any bytes, one after another."""
    return torch.cat([x[index] for x in tables])


def put_page(tables: Sequence[torch.Tensor], index: int, page: torch.Tensor) -> None:
    """Store what `get_page` returned."""
    sizes = [x.shape[1] for x in tables]
    for x, row in zip(tables, page.split_with_sizes(sizes), strict=True):
        x[index].copy_(row)


def attend_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: StepCache,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rule: AttentionRule,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotate and store new tokens; each attends to all up to itself, as the cache holds them.

    Args:
        q: queries (b, t, heads, head_dim) before rotation; kernels take up to `STEP_TOKENS`.
        k: keys (b, t, kv_heads, head_dim) before rotation.
        v: values, of the same shape as the keys.
        cache: the cache of one layer, and where the new tokens and the results go.
        cos: of the new positions, without any columns too; see `Ops.rotate`.
        sin: of the same shape.
        rule: what happens to the scores.
        interleaved: the pairs to rotate are neighbours; see `halved`.

    Returns:
        (b, t, heads, head_dim) in the dtype of q.
    """
    if interleaved:
        q, k = (halved(x.transpose(1, 2), 2 * cos.shape[-1]).transpose(1, 2) for x in (q, k))
    q, k = (rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    write_cache(cache.store, cache.slots.flatten(), k.flatten(0, 1), v.flatten(0, 1))
    outputs = []
    for row, length in enumerate(cache.lengths.tolist()):
        slots = _slots(cache.tables[row], length + q.shape[1], cache.store.page_tokens)
        keys, values = (x.float() for x in read_cache(cache.store, slots))
        outputs.append(_attention(q[row].float(), keys, values, rule))
    found = torch.stack(outputs).to(q.dtype)
    if cache.to is None:
        return found
    of_tokens = found.flatten(2)
    return torch.empty_like(of_tokens).index_copy_(2, cache.to.long(), of_tokens).view_as(found)


def _slots(table: torch.Tensor, length: int, page_tokens: int) -> torch.Tensor | slice:
    """Return the slots of the first positions; a slice, which copies nothing, if they are one."""
    first, *others = table[: max(1, -(-length // page_tokens))].tolist()
    if all(page == first + i for i, page in enumerate(others, 1)):
        return slice(first * page_tokens, first * page_tokens + length)
    return slots_of(table, 0, length, page_tokens)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attend causally, fp32: q (t, heads, d) are the last positions of k and v (p, kv_heads, d)."""
    count, positions, mask = len(q), len(k), None
    if count > 1 or any(n is not None and n < positions for n in (rule.window, rule.chunk)):
        queries = torch.arange(positions - count, positions, device=q.device)
        mask = rule.visible(queries, torch.arange(positions, device=q.device))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if rule.is_fused:
        attended = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=rule.scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    return (rule.weights(q @ k.mT, mask) @ v).transpose(0, 1)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Multiply the even places of every unit, and the odd ones, by H₃₂: rows (t, n), fp32."""
    units = x.float().view(len(x), x.shape[1] // UNIT, UNIT // 2, 2)
    return torch.einsum("ij,tujp->tuip", hadamard(UNIT // 2, x.device), units).reshape(x.shape)


@device_cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Return the Hadamard matrix in natural order, fp32 (size, size); `size` a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return sent(matrix, device)
