"""The cache operations on a GPU: kernels write and read rows, and attend for a few new tokens.

Everything else is torch on the device.
"""

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from exl2flow.core.errors import ConfigError
from exl2flow.kernels.cuda.compiler import (
    ATTENTION_STEP,
    ATTENTION_WARPS,
    LONG_ROW_PAD,
    ROW_PAD,
    THREADS,
    launch,
    limits,
)
from exl2flow.kernels.interface.attention_rule import AttentionRule
from exl2flow.kernels.interface.cache_formats import (
    PAGE_TOKENS,
    STEP_TOKENS,
    UNIT,
    CacheRows,
    Element,
    LayerStore,
    StepCache,
    padded_width,
)
from exl2flow.kernels.plans.sources import filled, struct
from exl2flow.kernels.reference import cache as torch_cache
from exl2flow.kernels.streams import device_table

PUT_THREADS = 256  # per copying CTA, 16 bytes each
PAGE_CTA_BYTES = 1 << 15  # of a page that a CTA moves, about
LAUNCH_TOKENS = 8  # most new tokens of a sequence in a launch
WIDTHS = (64, 128, 256)  # elements a kernel reads per position: whole units that cover a head
HEAD_STEP = 16  # head dims must be multiples of it, because copies are 16 bytes
TOGETHER_WIDTH = 128  # of heads that may share a CTA
MOST_TOGETHER = 4  # of them, of one column each
LEAST_BUSY = 0.75  # share of processors, for heads to share a CTA
ROW_BYTES = 256  # most bytes of a position's keys that a CTA of several heads reads
MOST_SPLITS = 32  # parts of a sequence's positions; each lane handles one
APART = 256  # least positions of a part, at full length
MOST_STAGES = 4  # steps that a warp has in flight
CTAS = 1  # per multiprocessor, at full length
SHORT, MOST_CTAS = 1024, 4  # positions at full length of which more CTAs share one, and how many
CODED_CTAS = 2  # the same for one token and key head in 4 bits, which take more time to decode
ALL = 2**31 - 1  # a window that hides nothing
SET = 8  # columns of an mma: pairs of a new token and a query head
WIDE_FROM = 1 << 14  # positions of all sequences, at full length, that are worth two sets in a CTA
LEAST_BESIDE = 18 << 10  # bytes of shared memory that are never for stages, nor were when measured
RESERVED = (1 << 10) + 64  # bytes of a CTA's shared memory: CUDA's own, and gaps between arrays
CALL = struct("attention.cu", "Call")


def check_pages(page_tokens: int) -> None:
    """See `Ops.check_pages`."""
    if page_tokens != PAGE_TOKENS:
        raise ConfigError(
            f"`page_tokens` is {page_tokens}; kernels for GPUs are compiled for pages of "
            f"{PAGE_TOKENS} tokens: leave it out, or compute on the CPU"
        )


def write_cache(store: LayerStore, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """See `Ops.write_cache`."""
    for rows, x in ((store.keys, k), (store.values, v)):
        _write_rows(rows, slots, x.reshape(len(slots), rows.width).half())


def _write_rows(rows: CacheRows, slots: torch.Tensor, x: torch.Tensor) -> None:
    is_wide = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if is_wide and _is_copied(rows):
        _copy_rows("put_rows", rows, slots, x.data_ptr(), x.stride(0) // 8)
    else:
        _launch_rows("write_rows", rows, slots, x.contiguous())


def read_cache(store: LayerStore, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.read_cache`."""
    shape = (-1, store.kv_heads, store.head_dim)
    keys, values = (_read_rows(rows, slots).view(shape) for rows in (store.keys, store.values))
    return keys, values


def _read_rows(rows: CacheRows, slots: torch.Tensor | slice) -> torch.Tensor:
    if isinstance(slots, slice):
        if rows.element is Element.HALF:
            return rows.data[slots].view(torch.float16)[:, : rows.width]
        slots = torch.arange(slots.start, slots.stop, device=rows.data.device)
    x = torch.empty(len(slots), rows.width, dtype=torch.float16, device=slots.device)
    if _is_copied(rows):
        _copy_rows("get_rows", rows, slots, x)
    else:
        _launch_rows("read_rows", rows, slots, x)
    return x


def _is_copied(rows: CacheRows) -> bool:
    """Return whether rows are stored as they are, without padding."""
    return rows.element is Element.HALF and rows.width % UNIT == 0


def _copy_rows(
    kernel: str, rows: CacheRows, slots: torch.Tensor, x: torch.Tensor | int, *step: int
) -> None:
    """Copy fp16 rows (t, width), `step` pieces of 16 bytes apart, to or from slots int64 (t,)."""
    pieces = rows.width // 8
    grid = (len(slots), -(-pieces // PUT_THREADS))
    launch("elementwise.cu", kernel, grid, x, slots, rows.data, pieces, *step, threads=PUT_THREADS)


def _launch_rows(kernel: str, rows: CacheRows, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Launch one warp per unit of fp16 rows (t, width) at slots int64 (t,)."""
    units = padded_width(rows.width) // UNIT
    grid = (len(slots), -(-units // (THREADS // 32)))
    element = list(Element).index(rows.element)
    launch("cache.cu", kernel, grid, x, slots, rows.data, rows.scales, rows.width, element)


def get_page(tables: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """See `Ops.get_page`."""
    nbytes = sum(x.shape[1] for x in tables)
    page = torch.empty(nbytes, dtype=torch.uint8, device=tables[0].device)
    _move_page(tables, index, page, is_stored=False)
    return page


def put_page(tables: Sequence[torch.Tensor], index: int, page: torch.Tensor) -> None:
    """See `Ops.put_page`."""
    _move_page(tables, index, page, is_stored=True)


def _move_page(
    tables: Sequence[torch.Tensor], index: int, page: torch.Tensor, *, is_stored: bool
) -> None:
    rows, place = list[int](), 0
    for x in tables:
        rows += (x.data_ptr(), x.shape[1], place)
        place += x.shape[1]
    table = device_table(tuple(rows), page.device)
    grid = (len(tables), max(1, max(x.shape[1] for x in tables) // PAGE_CTA_BYTES))
    launch("cache.cu", "move_page", grid, page, table, index, int(is_stored), threads=PUT_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionLaunch:
    """The launch of a step's attention, without tensors.

    name: the kernel's instance; threads, shared: of a CTA; sums: shape of what CTAs exchange;
    argument: `CALL`.
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    sums: tuple[int, ...]
    argument: np.void


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
    """See `Ops.attend_step`."""
    other = _other_way(q, cache, rule)
    if other is not None:
        return other(q, k, v, cache, cos, sin, rule=rule, interleaved=interleaved)
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, count = torch.empty_like(q), q.shape[1]
    angles = (cos, sin) if cos.numel() else (q, q)  # the first is read even without rotation
    rows = {"q": q, "k": k, "v": v, "out": out, "slots": cache.slots}
    fixed = _fields(count, cache, cos, rule) | {"interleaved": interleaved}
    step = -(-count // -(-count // LAUNCH_TOKENS))
    for begin in range(0, count, step):
        plan = _planned(q, min(step, count - begin), cache.store, cache.tables.shape[1])
        partial = torch.empty(plan.sums, device=q.device)
        call = filled(
            plan.argument,
            **fixed,
            **{name: _from(begin, x) for name, x in rows.items()},
            cosines=_from(begin, angles[0], axis=-2),
            sines=_from(begin, angles[1], axis=-2),
            partial=partial,
            arrived=_counters(cache.store, math.prod(plan.sums[:3])),
            after=begin,
        )
        for name, stored in (("keys", cache.store.keys), ("values", cache.store.values)):
            filled(call[name], data=stored.data, scales=stored.scales)
        launch(
            "attention.cu",
            plan.name,
            plan.grid,
            call,
            threads=plan.threads,
            shared=plan.shared,
            device=q.device,
        )
    return out


def _fields(
    count: int, cache: StepCache, cos: torch.Tensor, rule: AttentionRule
) -> dict[str, torch.Tensor | float]:
    """Return what is the same in all launches of a step of `count` new tokens."""
    return {
        "tables": cache.tables,
        "lengths": cache.lengths,
        "to": 0 if cache.to is None else cache.to,
        "sinks": 0 if rule.sinks is None else rule.sinks,
        "window": rule.window or ALL,
        "half": cos.shape[-1],
        "angle_step": cos.stride(0) if cos.dim() == 4 else 0,
        "scale": rule.scale,
        "softcap": rule.softcap or 0.0,
        "apart": count,
    }


def _from(begin: int, x: torch.Tensor, axis: int = 1) -> torch.Tensor | int:
    """Return where x begins from a new token on; `axis`: that of the tokens."""
    return x.data_ptr() + begin * x.stride(axis) * x.element_size() if begin else x


def _other_way(
    q: torch.Tensor, cache: StepCache, rule: AttentionRule
) -> Callable[..., torch.Tensor] | None:
    """Return what attends where launches for several tokens cannot; None: they can."""
    is_known = q.shape[1] <= STEP_TOKENS and _width(q.shape[3]) is not None
    if not is_known or q.dtype != torch.float16:
        return torch_cache.attend_step
    if rule.chunk is None or cache.tables.shape[1] * PAGE_TOKENS <= rule.chunk:
        return None
    return _in_chunks if rule.chunk % PAGE_TOKENS == 0 else torch_cache.attend_step


def _in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: StepCache,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rule: AttentionRule,
    interleaved: bool,
) -> torch.Tensor:
    """Attend token by token: each sees the pages of its chunk only, which are whole."""
    assert rule.chunk is not None
    whole, pages, found = replace(rule, chunk=None), rule.chunk // PAGE_TOKENS, []
    for token in range(q.shape[1]):
        one, own = slice(token, token + 1), _of_chunk(cache, token, pages)
        a, b, c = (x[:, one] for x in (q, k, v))
        d, e = (x[..., one, :].contiguous() for x in (cos, sin))
        found.append(attend_step(a, b, c, own, d, e, rule=whole, interleaved=interleaved))
    return torch.cat(found, dim=1)


def _of_chunk(cache: StepCache, token: int, pages: int) -> StepCache:
    """Return the cache for one of the new tokens, as if the text began with the token's chunk.

    pages: of a chunk.
    """
    lengths, last = cache.lengths + token, cache.tables.shape[1] - 1
    first = lengths // (pages * PAGE_TOKENS) * pages
    places = first[:, None] + torch.arange(pages, device=lengths.device)
    return replace(
        cache,
        tables=cache.tables.gather(1, places.clamp(max=last).long()),
        lengths=lengths - first * PAGE_TOKENS,
        slots=cache.slots[:, token : token + 1].contiguous(),
    )


def _planned(q: torch.Tensor, t: int, store: LayerStore, pages: int) -> _AttentionLaunch:
    """Divide `t` of queries (b, …, heads, head_dim), and positions of `pages`, among CTAs."""
    (b, _, heads, head_dim), kv_heads, length = q.shape, store.kv_heads, pages * PAGE_TOKENS
    elements, pairs = (store.keys.element, store.values.element), t * heads // kv_heads
    width, bits = _width(head_dim), sum(element.bits for element in elements)
    assert width is not None
    is_coded = all(element.has_scales for element in elements)
    most = 1 if t == 1 else LAUNCH_TOKENS
    columns = _columns(most, width, pairs, b * length, is_coded=is_coded)
    processors, most_shared = limits(q.device.index)
    together = 1
    if columns == pairs < SET and width == head_dim == TOGETHER_WIDTH:
        together = _heads_together(
            pairs, elements[0].bits, kv_heads, batch=b, processors=processors
        )
    columns, teams, parts = columns * together, kv_heads // together, -(-pairs // columns)
    is_small = is_coded and bits == 2 * Element.ROTATED_4.bits and most == 1
    ctas, of_split = CODED_CTAS if is_small and together == 1 else CTAS, b * teams * parts
    splits = min(MOST_SPLITS, max(1, ctas * processors // of_split), max(1, length // APART))
    if length <= SHORT:
        ctas = max(ctas, min(MOST_CTAS, -(-of_split // processors)))
    members = _members(columns, together)
    teams_of_cta, stages, shared = _stages(
        bits,
        together * width,
        columns,
        members=members,
        positions=-(-length // splits),
        room=most_shared // ctas - max(LEAST_BESIDE, _beside(bits, width, most, columns, together)),
    )
    formats = ", ".join(element.name for element in elements)
    return _AttentionLaunch(
        name=f"attend<{width}, {formats}, {most}, {columns}, {together}>",
        grid=(splits, teams * parts, b),
        threads=32 * teams_of_cta * members,
        shared=shared,
        sums=(b, teams, parts, splits, columns, width + 4),
        argument=filled(
            np.zeros(1, CALL)[0],
            tokens=t,
            heads=heads,
            kv_heads=kv_heads,
            parts=parts,
            head_dim=head_dim,
            pages=pages,
            splits=splits,
            stages=stages,
        ),
    )


def _width(head_dim: int) -> int | None:
    """Return the elements per position that a kernel reads; None if no kernel fits."""
    if head_dim % HEAD_STEP:
        return None
    reach = head_dim + UNIT - math.gcd(head_dim, UNIT)  # heads may begin anywhere in a unit
    return next((width for width in WIDTHS if width >= reach), None)


def _columns(tokens: int, width: int, pairs: int, positions: int, *, is_coded: bool) -> int:
    """Return how many pairs of a new token and a query head share a CTA, one or two sets.

    Two sets read positions half as often, but take more time before and after. If keys and values
    are codes, up to half a set of heads divides an mma's columns among its parts.
    """
    if tokens == 1 and is_coded and 2 * pairs <= SET and width < WIDTHS[-1]:
        return 1 << (pairs - 1).bit_length()
    is_wide = tokens > 1 and pairs > SET and width < WIDTHS[-1] and positions >= WIDE_FROM
    return 2 * SET if is_wide else SET


def _heads_together(pairs: int, bits: int, kv_heads: int, *, batch: int, processors: int) -> int:
    """Return how many key heads of `pairs` columns each share a CTA, if all of these keep busy.

    A position's 64 bytes of one head in 4 bits are read at three quarters of memory's rate.

    Args:
        pairs: a power of two, up to half a set.
        bits: of an element of a key.
        kv_heads: of the layer.
        batch: sequences.
        processors: of the device.
    """

    def share_of_busy(together: int) -> float:
        teams = batch * kv_heads // together
        ctas = teams * min(MOST_SPLITS, max(1, processors // teams))
        return ctas / (-(-ctas // processors) * processors)

    together = MOST_TOGETHER if pairs == 1 else 2
    while together > 1 and (
        kv_heads % together
        or together * TOGETHER_WIDTH * bits // 8 > ROW_BYTES
        or share_of_busy(together) < LEAST_BUSY
    ):
        together //= 2
    return together


def _members(columns: int, together: int) -> int:
    """Return how many warps take the same positions, each for its own key heads."""
    return 2 if together == 2 and columns > together else 1


def _pad(width: int) -> int:
    """Return the bytes after each key or value of this many elements, in shared memory."""
    return LONG_ROW_PAD if width > WIDTHS[-1] else ROW_PAD


def _beside(bits: int, width: int, tokens: int, columns: int, together: int = 1) -> int:
    """Return most bytes of a CTA's shared memory that are not for stages: arrays of attention.cu.

    Args:
        bits: of an element of a key and one of a value.
        width: elements read per position.
        tokens: most new tokens.
        columns: of a CTA.
        together: its key heads.
    """
    of_column = width + width // 2 + 4 + 2 * ATTENTION_WARPS + MOST_SPLITS  # and 2 rows of a token
    new = tokens * together * width
    fresh = new * bits // 8 + 2 * tokens * _pad(together * width)
    return 4 * (columns * of_column + 2 * new) + fresh + RESERVED


def _stages(
    bits: int, width: int, columns: int, *, members: int, positions: int, room: int
) -> tuple[int, int, int]:
    """Return teams of warps per CTA, steps in flight per team, and bytes for all of them.

    Args:
        bits: of an element of a key and one of a value.
        width: elements read per position.
        members: warps that take the same positions.
        columns: of a CTA; their sums of values, fp32, are at last where a warp's stages were.
        positions: most positions of a CTA.
        room: available bytes of shared memory.
    """
    row = width * bits // 8
    step = 32 if members == 1 and 32 * row <= ATTENTION_STEP else 16
    stage, teams = step * (row + 2 * _pad(width)), ATTENTION_WARPS
    least = -(-4 * columns * (width + 1) // stage)
    while teams > 1 and max(2, least) * teams * stage > room:
        teams //= 2
    stages = min(MOST_STAGES, room // (teams * stage), -(-positions // (teams * step)))
    stages = max(1, least, stages)
    return teams, stages, teams * stages * stage


# by a layer's keys and by their number: passes over a layer follow each other
_COUNTERS: MutableMapping[torch.Tensor, dict[int, torch.Tensor]] = WeakIdKeyDictionary()


def _counters(store: LayerStore, count: int) -> torch.Tensor:
    """Return zeros int32 (count,), for a count always the same; each launch leaves them zero."""
    of_layer = _COUNTERS.setdefault(store.keys.data, {})
    counters = of_layer.get(count)
    if counters is None:
        counters = torch.zeros(count, dtype=torch.int32, device=store.keys.data.device)
        if not torch.cuda.is_current_stream_capturing():  # a recording frees what it allocates
            of_layer[count] = counters
    return counters
