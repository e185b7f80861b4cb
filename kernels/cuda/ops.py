"""The CUDA implementation of `Ops`: the kernels of `csrc/`, on torch's current stream.

Nothing waits for the device. Each method computes what that of `Ops` does, with sums in another
order; methods that are not overridden run torch on the device.
"""

import atexit
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from exl2flow.core.runtime.background import own_stream
from exl2flow.kernels.cuda import cache as cuda_cache
from exl2flow.kernels.cuda import delta as cuda_delta
from exl2flow.kernels.cuda import exchange as cuda_exchange
from exl2flow.kernels.cuda import experts as cuda_experts
from exl2flow.kernels.cuda import packing as cuda_packed
from exl2flow.kernels.cuda import products as cuda_products
from exl2flow.kernels.cuda import prompts as cuda_prompts
from exl2flow.kernels.cuda import sampler as cuda_sampler
from exl2flow.kernels.cuda import steps as cuda_steps
from exl2flow.kernels.cuda.ahead import GENERATION, ROUNDING, build_ahead
from exl2flow.kernels.cuda.compiler import (
    GRID_TOGETHER,
    THREADS,
    capability,
    launch,
    limits,
    whole_warps,
)
from exl2flow.kernels.cuda.graphs import CAPTURING, EmptyRecording, not_empty
from exl2flow.kernels.cuda.packing import panel_table
from exl2flow.kernels.interface.facts import CardFacts
from exl2flow.kernels.interface.groups import (
    MOST_COLUMNS,
    PANEL_ROWS,
    BegunGroups,
    Group,
    Scales,
    half_ranges,
)
from exl2flow.kernels.reference.ops import (
    GRID_EXPONENT,
    GRID_POINTS,
    MAXIMA,
    WIDEST_COLUMNS,
    Ops,
    sample_step,
    search_multiples,
)
from exl2flow.kernels.reference.refit import (
    REFIT_MAXIMA,
    STRENGTHS,
    maxima_multiples,
    times_hessian,
    times_output,
)
from exl2flow.kernels.streams import device_table

log = logging.getLogger(__name__)


class CudaOps(Ops):
    """`Ops` with kernels."""

    norm = staticmethod(cuda_steps.norm)
    rotate = staticmethod(cuda_steps.rotate)
    joined = staticmethod(cuda_steps.joined)
    embed = staticmethod(cuda_steps.embed)
    next_slots = staticmethod(cuda_steps.next_slots)
    gated = staticmethod(cuda_steps.gated)
    activated = staticmethod(cuda_steps.activated)
    lay_out = staticmethod(cuda_packed.lay_out)
    lay_out_scales = staticmethod(cuda_packed.lay_out_scales)
    check_pages = staticmethod(cuda_cache.check_pages)
    write_cache = staticmethod(cuda_cache.write_cache)
    read_cache = staticmethod(cuda_cache.read_cache)
    get_page = staticmethod(cuda_cache.get_page)
    put_page = staticmethod(cuda_cache.put_page)
    attend_step = staticmethod(cuda_cache.attend_step)
    decode_packed = staticmethod(cuda_prompts.decode_packed)
    multiply = staticmethod(cuda_products.multiply)
    new_boxes = staticmethod(cuda_exchange.new_boxes)
    multiply_at_once = staticmethod(cuda_products.multiply_at_once)
    experts = staticmethod(cuda_experts.experts)
    experts_at_once = staticmethod(cuda_experts.experts_at_once)
    runs_experts = staticmethod(cuda_experts.runs_experts)
    launches = staticmethod(cuda_products.launches)
    delta_step = staticmethod(cuda_delta.delta_step)
    delta_scan = staticmethod(cuda_delta.delta_scan)
    sample = staticmethod(cuda_sampler.sample)

    def _grid_costs(
        self, x: torch.Tensor, groups: Sequence[Group], steps: torch.Tensor, grid: torch.Tensor
    ) -> torch.Tensor:
        j, r, n = x.shape
        costs = torch.empty(j, GRID_POINTS, _tiles(n), device=x.device)
        parts = -(-GRID_POINTS // GRID_TOGETHER)
        weights, tables = steps.pow(GRID_EXPONENT), _group_tables(groups, x.device)
        launch(
            "search.cu",
            "grid_cost",
            (_tiles(n), parts, j),
            *(x.contiguous(), steps, weights, *tables, grid, costs, r, n),
        )
        return costs.sum(dim=2)

    def begin_groups(
        self,
        rows: torch.Tensor,
        members: Mapping[int, Group],
        scales: Scales,
        half_range: torch.Tensor,
        row_weights: torch.Tensor | None = None,
    ) -> None:
        """See `Ops.begin_groups`."""
        if row_weights is None:
            super().begin_groups(rows, members, scales, half_range)
            return
        (_, m), n, j, device = rows.shape, scales.codes.shape[2], len(members), rows.device
        halves, counts = _group_tables(list(members.values()), device)
        places = device_table(tuple(members), device)
        searched, base = (rows, places, counts, halves), torch.empty(j, n, device=device)
        launch("search.cu", "column_ranges", (_tiles(n), j), *searched, base, m, n)
        whose = _row_weights(row_weights, scales.codes.shape[1])
        chosen = _best_maxima(searched, whose, base, scales.maxima)
        launch(
            "search.cu",
            "choose_codes",
            (_tiles(n), j),
            *(*searched, *whose, base, chosen),
            *(scales.codes, scales.decoded, half_range, m, n),
        )

    def round_panel(
        self,
        rows: torch.Tensor,
        upper: torch.Tensor,
        scales: torch.Tensor,
        half_range: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.round_panel`."""
        if output is not None and output.shape[1] > MOST_COLUMNS:
            return super().round_panel(rows, upper, scales, half_range, output)
        p, m = rows.shape
        codes = torch.empty(p, m, dtype=torch.uint8, device=rows.device)
        errors = torch.empty_like(rows)
        upper = _by_rows(upper)
        f = len(upper)
        first = (rows, *_block_of(upper), scales, half_range)
        if output is None:
            own = m // f
            launch("round.cu", "round_panel", (_tiles(own), f), *first, codes, errors, p, own)
        else:
            blocks, b, _ = output.shape
            last = (output, codes, errors, torch.empty_like(rows), p, m, b, blocks // f)
            launch("round.cu", "round_coupled", (blocks,), *first, *last, threads=whole_warps(b))
        return codes, errors

    def descend_panel(
        self,
        steps: torch.Tensor,
        gradient: torch.Tensor,
        hessian: torch.Tensor,
        scales: torch.Tensor,
        half_range: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.descend_panel`."""
        if output is not None and output.shape[1] > MOST_COLUMNS:
            return super().descend_panel(steps, gradient, hessian, scales, half_range, output)
        p, m = steps.shape
        change = torch.empty_like(steps)
        hessian = _by_rows(hessian)
        f = len(hessian)
        first = (steps, gradient, *_block_of(hessian), scales, half_range)
        if output is None:
            own = m // f
            launch("descend.cu", "descend_panel", (_tiles(own), f), *first, change, p, own)
        else:
            blocks, b, _ = output.shape
            last = (output, change, p, m, b, blocks // f)
            launch(
                "descend.cu", "descend_coupled", (blocks,), *first, *last, threads=whole_warps(b)
            )
        return change

    def refit_scales(
        self,
        steps: torch.Tensor,
        gradient: torch.Tensor,
        hessian: torch.Tensor,
        begun: BegunGroups,
        scales: Scales,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.refit_scales`."""
        r, (_, j, n) = len(steps), scales.decoded.shape
        steps, pushed = begun.only(steps), times_output(gradient, output)
        curvature, wanted = _wanted_scales(steps, pushed, hessian, scales, output)
        codes, maxima, decoded, change = _nearest_scales(wanted, curvature, steps, scales)
        bent = times_output(change.flatten(0, 1), output).view(change.shape)
        if hessian.ndim == 2:
            moved = hessian @ bent
        else:
            moved = torch.stack([times_hessian(hessian, x) for x in bent])
        tiles, sizes = _tiles(n), (r, n, j)
        rises, taken = steps.new_empty(STRENGTHS * j, tiles), torch.empty_like(steps)
        grid = (tiles, STRENGTHS * j)
        launch("refit.cu", "scale_rises", grid, moved, pushed, change, rises, *sizes)
        launch(
            "refit.cu",
            "take_scales",
            (tiles, j),
            *(rises, codes, maxima, decoded, change, begun.rows),
            *(scales.codes, scales.maxima, scales.decoded, taken, *sizes, STRENGTHS),
        )
        return taken

    def decode_scales(self, codes: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
        """See `Ops.decode_scales`."""
        n = codes.shape[-1]
        scales = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
        grid = (_tiles(n), max_scales.numel())
        launch(
            "pack.cu", "decode_scales", grid, codes.contiguous(), max_scales.contiguous(), scales, n
        )
        return scales

    def pack(self, codes: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """See `Ops.pack`."""
        k, n = codes.shape
        table, words = panel_table(tuple(groups), codes.device)
        packed = torch.empty(words, n, dtype=torch.int32, device=codes.device)
        grid = (_tiles(n), k // PANEL_ROWS)
        launch("pack.cu", "pack", grid, codes.contiguous(), table, packed, n)
        return packed

    def unpack(self, packed: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """See `Ops.unpack`."""
        n = packed.shape[1]
        table, _ = panel_table(tuple(groups), packed.device)
        codes = torch.empty(len(table) * PANEL_ROWS, n, dtype=torch.uint8, device=packed.device)
        launch("pack.cu", "unpack", (_tiles(n), len(table)), packed.contiguous(), table, codes, n)
        return codes

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, groups: Sequence[Group]
    ) -> torch.Tensor:
        """See `Ops.decode`."""
        n = codes.shape[1]
        table, _ = panel_table(tuple(groups), codes.device)
        matrix = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
        grid = (_tiles(n), len(table))
        launch("pack.cu", "decode", grid, codes.contiguous(), scales.contiguous(), table, matrix, n)
        return matrix

    def card(self, device: torch.device) -> CardFacts | None:
        """See `Ops.card`."""
        index = torch.cuda.current_device() if device.index is None else device.index
        processors, shared = limits(index)
        return CardFacts(capability=capability(index), processors=processors, shared=shared)

    def prepare(self) -> None:
        """See `Ops.prepare`."""
        build_ahead(GENERATION)

    def prepare_rounding(self) -> None:
        """See `Ops.prepare_rounding`."""
        build_ahead(ROUNDING)

    def repeat(self, work: Callable[[], None], times: int) -> None:
        """See `Ops.repeat`: launches are recorded, because Python is slower than the device.

        A capture has its own memory; without enough of it, nothing is captured. Work for another
        device than the current one is launched.
        """
        if times == 0:
            return
        current = torch.cuda.current_stream()
        with CAPTURING, suppress(torch.OutOfMemoryError):
            stream, first = _recorder(current)
            stream.wait_stream(current)
            try:
                graph = _recorded(work, stream, first.pool())
            except EmptyRecording as error:
                log.warning("work is launched %d times, not recorded: %s", times, error)
            else:
                for _ in range(times):
                    graph.replay()
                del graph  # launches in flight continue
                return
        super().repeat(work, times)


def _best_maxima(
    searched: tuple[torch.Tensor, ...],
    whose: tuple[int, ...],
    base: torch.Tensor,
    maxima: torch.Tensor,
) -> torch.Tensor:
    """Return the best maximum of each group, fp16 (j,), and store it among those of all matrices.

    searched: rows, and places, row counts and half ranges of the groups; whose: see `_row_weights`;
    base: fp32 (j, n), ranges of their columns.
    """
    (_, places, *_), (j, n), m = searched, base.shape, searched[0].shape[1]
    order, step = base.argsort(dim=1, descending=True, stable=True), sample_step(n)
    sampled = min(n, WIDEST_COLUMNS) - (min(0, WIDEST_COLUMNS - n) // step)
    cost, multiples = base.new_empty(j, MAXIMA, sampled), search_multiples(base.device)
    chosen, grid = base.new_empty(j, dtype=torch.float16), (_tiles(sampled), MAXIMA, j)
    tried, columns = (base, order, multiples, cost), (n, step, sampled)
    launch("search.cu", "maximum_costs", grid, *searched, *whose, *tried, m, *columns)
    threads = 32 * MAXIMA
    launch(
        "search.cu", "best_maximum", (j,), places, *tried, chosen, maxima, *columns, threads=threads
    )
    return chosen


def _wanted_scales(
    steps: torch.Tensor,
    pushed: torch.Tensor,
    hessian: torch.Tensor,
    scales: Scales,
    output: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the objective's curvature in each scale, and the scale at its minimum, fp32 (m,)."""
    (r, m), b = steps.shape, 1 if output is None else output.shape[1]
    curvature, wanted = steps.new_empty(2, m)
    pushes = (times_hessian(hessian, steps), pushed, 0 if output is None else output)
    launch(
        "refit.cu",
        "wanted_scales",
        (_tiles(m),),
        *(steps, *pushes, scales.decoded, curvature, wanted, r, m, b),
    )
    return curvature, wanted


def _nearest_scales(
    wanted: torch.Tensor, curvature: torch.Tensor, steps: torch.Tensor, scales: Scales
) -> tuple[torch.Tensor, ...]:
    """Return codes, maxima and scales nearest to wanted ones, and the change, by strength."""
    (r, m), (_, j, n) = steps.shape, scales.decoded.shape
    grid, multiples = (_tiles(n), STRENGTHS * j), maxima_multiples(steps.device)
    misses = steps.new_empty(STRENGTHS * j, REFIT_MAXIMA, _tiles(n))
    tried = (scales.decoded, scales.maxima, multiples, misses)
    launch("refit.cu", "scale_misses", grid, wanted, curvature, *tried, n, j)
    codes = steps.new_empty(STRENGTHS, m, dtype=torch.uint8)
    maxima = steps.new_empty(STRENGTHS, j, dtype=torch.float16)
    decoded, change = steps.new_empty(STRENGTHS, m), steps.new_empty(STRENGTHS, r, m)
    nearest = (codes, maxima, decoded, change)
    launch("refit.cu", "nearest_scales", grid, wanted, *tried, steps, *nearest, r, n, j)
    return nearest


@lru_cache(maxsize=16)
def _recorder(current: torch.cuda.Stream) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """Return the stream that captures for `current`, and a first graph, which owns their memory.

    Torch hands out its 32 streams in turn: creating new ones would record other streams' work.
    """
    stream = own_stream(current.device, ("captures of", current))
    pool = torch.cuda.graph_pool_handle()
    return stream, _recorded(lambda: torch.zeros(1, device=current.device), stream, pool)


atexit.register(_recorder.cache_clear)  # while the driver is still loaded


def _recorded(
    work: Callable[[], object], stream: torch.cuda.Stream, pool: Any
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError), not_empty(stream.device):  # it is discarded anyway
                graph.capture_end()
            raise
        with not_empty(stream.device):
            graph.capture_end()
    return graph


def _group_tables(
    groups: Sequence[Group], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the half ranges fp32 (j,) and rows int64 (j,) of groups."""
    rows = device_table(tuple(group.rows for group in groups), device)
    return half_ranges(tuple(group.bits for group in groups), device), rows


def _by_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return matrices (…, r, c) whose rows are contiguous, as (f, r, c); cuSOLVER's are not."""
    matrix = matrix if matrix.stride(-1) == 1 else matrix.contiguous()
    return matrix if matrix.ndim == 3 else matrix[None]


def _block_of(matrices: torch.Tensor) -> tuple[int, int, int]:
    """Return where blocks (f, p, p) are, and the distances of their rows and of the blocks."""
    return matrices.data_ptr(), matrices.stride(1), matrices.stride(0)


def _row_weights(row_weights: torch.Tensor, j: int) -> tuple[int, int, int]:
    """Return where weights (f, r) or (r,) of `j` matrices are, their distance, matrices of each."""
    assert row_weights.stride(-1) == 1
    if row_weights.ndim == 1:
        return row_weights.data_ptr(), 0, j
    return row_weights.data_ptr(), row_weights.stride(0), j // len(row_weights)


def _tiles(n: int) -> int:
    return -(-n // THREADS)


CUDA_OPS = CudaOps()
