"""`Ops`: every operation that quantization and inference need from a device, in torch.

It is the interface, and the specification of every kernel: `CudaOps` overrides what is slow.

fp16 rounding is `.half()` of an exact fp32 product, so every step is the round to nearest even of
the format's dequantization law (`docs/format.md` section 3), subnormals included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from exl2flow.kernels.interface import packed
from exl2flow.kernels.interface.boxes import Boxes
from exl2flow.kernels.interface.experts import ExpertBank
from exl2flow.kernels.interface.facts import CardFacts, PlanFacts
from exl2flow.kernels.interface.groups import PANEL_ROWS, SCALE_LEVELS, Group, Scales, half_ranges
from exl2flow.kernels.interface.packed import FusedLinear, runs_of
from exl2flow.kernels.reference import cache as torch_cache
from exl2flow.kernels.reference import delta as torch_delta
from exl2flow.kernels.reference import experts as torch_experts
from exl2flow.kernels.reference import refit as torch_refit
from exl2flow.kernels.reference import router as torch_router
from exl2flow.kernels.reference import sampler as torch_sampler
from exl2flow.kernels.reference import steps as torch_steps
from exl2flow.kernels.reference.descent import descent_of
from exl2flow.kernels.streams import device_cache, device_table, sent

GRID_POINTS = 97  # multipliers tried on a group's maximum scale
GRID_START, GRID_END = 0.70, 1.20
GRID_EXPONENT = 3.5  # exponent of the absolute error that ranks multipliers
MAXIMA = 12  # multiples of a group's largest range tried as its maximum by a column search
MAXIMA_START, MAXIMA_END = 0.50, 1.15
SAMPLED_COLUMNS = 128  # about this many others judge the maximum, in addition to
WIDEST_COLUMNS = 32  # the ones with the largest ranges
CODE_REACH = 2  # scale codes tried on either side of the expected one
EXPECTED_SHARE = 0.9  # the best scale is expected at this share of a column's range
EPSILON = 1e-12  # keeps an all-zero column's scale positive
CACHED_ELEMENTS = 1 << 14  # per piece of the grid search, so that it fits in one core's cache


class Ops:
    """The operations of quantization and inference; all tensors of a call lie on one device.

    Vectorized over columns, and over matrices. Those side by side share a Hessian, or have f of
    them: then blocks of it, or of its factor, are (f, …), and the columns of each lie together, in
    the same order and number.
    """

    check_pages = staticmethod(torch_cache.check_pages)
    write_cache = staticmethod(torch_cache.write_cache)
    read_cache = staticmethod(torch_cache.read_cache)
    get_page = staticmethod(torch_cache.get_page)
    put_page = staticmethod(torch_cache.put_page)
    attend_step = staticmethod(torch_cache.attend_step)
    decode_packed = staticmethod(packed.decode_packed)
    norm = staticmethod(torch_steps.norm)
    gated = staticmethod(torch_steps.gated)
    activated = staticmethod(torch_steps.activated)
    rotate = staticmethod(torch_steps.rotate)
    joined = staticmethod(torch_steps.joined)
    embed = staticmethod(torch_steps.embed)
    next_slots = staticmethod(torch_steps.next_slots)
    route = staticmethod(torch_router.route)
    nearly_chosen = staticmethod(torch_router.nearly_chosen)
    experts = staticmethod(torch_experts.experts)
    gated_delta = staticmethod(torch_delta.gated_delta)
    delta_step = staticmethod(torch_delta.delta_step)
    delta_scan = staticmethod(torch_delta.delta_scan)
    sample = staticmethod(torch_sampler.sample)
    decode_scales = staticmethod(torch_refit.decode_scales)
    refit_scales = staticmethod(torch_refit.refit_scales)

    def multiply(
        self, x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return x Q + bias of packed matrices, summed in fp32; chain several products.

        Args:
            x: fp16 (rows, k), in the order of in-features unless the first product `is_ordered`.
            products: each reads the previous result; up to three matrices each, or two and three
                `beside`, one result in all but the last.
            hidden: fp16 (rows, columns), results are added to it; None: zeros.

        Returns:
            The results of the last product, (rows, columns) each, fp32 if it is `exact`, else
            fp16, and those of matrices `beside`, in order; and the last hidden state, or the first
            result once more if there is none.
        """
        results, beside = [x], list[torch.Tensor]()
        for p in products:
            x = p.in_natural_order(results[0])
            x = x if p.norm is None else self.norm(x, p.norm)
            dtype = torch.float32 if p.exact else torch.float16
            results = [(x.float() @ packed.decode_packed(m).float()).to(dtype) for m in p.matrices]
            results = [
                y if m.bias is None else y + m.bias
                for y, m in zip(results, p.matrices, strict=True)
            ]
            results, others = results[: len(p.main)], results[len(p.main) :]
            beside += others
            if p.activation is not None and p.is_gated:
                results = [self.gated(results[0], results[1], p.activation)]
            elif p.activation is not None:
                results = [self.activated(results[0], p.activation)]
            if p.after is not None:
                results = [self.norm(y, p.after) for y in results]
            if p.multiplier != 1.0:
                results = [y * p.multiplier for y in results]
            if p.adds:
                results = [results[0] if hidden is None else results[0] + hidden]
                hidden = results[0]
        return [*results, *beside], results[0] if hidden is None else hidden

    def new_boxes(self, rank: int, count: int, device: torch.device) -> Boxes | None:
        """Return boxes for one of `count` ranks, still closed; None if it cannot share memory."""
        return None

    def multiply_at_once(
        self, x: torch.Tensor, products: Sequence[FusedLinear], hidden: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        """Return what `multiply` does of products with `boxes`; None if no one launch runs all."""
        return None

    def experts_at_once(
        self, hidden: torch.Tensor, bank: ExpertBank, boxes: Boxes
    ) -> torch.Tensor | None:
        """Return hidden states fp16 (rows, hidden) after the experts of all ranks.

        None: no launch computes and adds up the parts of ranks, which share `boxes`.
        """
        return None

    def runs_experts(self, bank: ExpertBank) -> bool:
        """Return whether `experts` runs such a layer without waiting for its routes."""
        return False

    def launches(self, products: Sequence[FusedLinear], rows: int) -> list[PlanFacts]:
        """Return the launches in which `multiply` computes a chain for a number of rows.

        None: matrices are decoded first, or torch multiplies.
        """
        return []

    def card(self, device: torch.device) -> CardFacts | None:
        """Return what decides on a GPU how products are launched; None without one."""
        return None

    def search_grid(
        self, x: torch.Tensor, groups: Sequence[Group]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose scale codes from column ranges, and the best maximum, for several matrices.

        Args:
            x: fp32 (j, r, n), current rows of each of `j` matrices from the start of a group.
            groups: one per matrix; rows beyond a group's own are ignored.

        Returns:
            Scale codes uint8 (j, n) from 0 to 15, and the stored maxima fp16 (j,).

        `docs/format.md` section 4 has the formulas.
        """
        base = self._column_ranges(x, groups)  # (j, n)
        largest = base.amax(dim=1, keepdim=True)
        levels = (SCALE_LEVELS * (base / largest).sqrt()).round().clamp(1, SCALE_LEVELS)
        steps = (levels / SCALE_LEVELS).square() * largest  # (j, n)
        grid = _grid(x.device)
        best = grid[self._grid_costs(x, groups, steps, grid).argmin(dim=1)]  # the first minimum
        return (levels - 1).to(torch.uint8), (largest[:, 0] * best).half()

    def search_columns(
        self, x: torch.Tensor, groups: Sequence[Group], row_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the maximum and every column's scale code by weighted squared error.

        Args:
            x: as for `search_grid`.
            groups: as for `search_grid`.
            row_weights: fp32 (r,), weight of each row's squared error; or (j, r), by matrix.

        Returns:
            As `search_grid`.
        """
        row_weights = row_weights.expand(len(groups), -1)
        base = self._column_ranges(x, groups)  # (j, n)
        multiples = search_multiples(x.device)
        maxima = (base.amax(dim=1, keepdim=True) * multiples).half()  # (j, MAXIMA)
        sample, weights = _sample(base)  # (j, s), (s,)
        seen = x.gather(2, sample[:, None].expand(-1, x.shape[1], -1))  # (j, r, s)
        _, cost = self._best_codes(seen, groups, row_weights, base.gather(1, sample), maxima)
        best = (cost * weights).sum(dim=2).argmin(dim=1, keepdim=True)
        chosen = maxima.gather(1, best)  # (j, 1)
        codes, _ = self._best_codes(x, groups, row_weights, base, chosen)
        return codes[:, 0], chosen[:, 0]

    def begin_groups(
        self,
        rows: torch.Tensor,
        members: Mapping[int, Group],
        scales: Scales,
        half_range: torch.Tensor,
        row_weights: torch.Tensor | None = None,
    ) -> None:
        """Choose the scales of the groups that begin at a row, for matrices side by side.

        Args:
            rows: fp32 (r, m), current rows from there on, r rows in the longest group.
            members: index of each matrix, of `j`, that has a group → the group.
            scales: of this one panel; overwritten for the members.
            half_range: fp32 (m,), 2 ** (bits - 1) of each column; overwritten for the members.
            row_weights: fp32 (r,), or (f, r), for `search_columns`; None: use `search_grid`.
        """
        _, j, n = scales.codes.shape
        groups, places = list(members.values()), device_table(tuple(members), rows.device)
        x = rows.view(-1, j, n).transpose(0, 1)[places]
        if row_weights is None:
            codes, maxima = self.search_grid(x, groups)
        else:
            if row_weights.ndim == 2:
                row_weights = row_weights[places * len(row_weights) // j]
            codes, maxima = self.search_columns(x, groups, row_weights)
        scales.codes[0, places] = codes
        scales.maxima[0, places] = maxima
        scales.decoded[0, places] = self.decode_scales(codes, maxima).float()
        halves = half_ranges(tuple(group.bits for group in groups), rows.device)
        half_range.view(j, n)[places] = halves[:, None].expand(-1, n)

    def _column_ranges(self, x: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Return the scales at which codes just span each column: x fp32 (j, r, n) → (j, n)."""
        parts = zip(x, groups, strict=True)
        ranges = [
            (rows[: g.rows].abs().amax(dim=0) + EPSILON) / (g.half_range - 0.5) for rows, g in parts
        ]
        return torch.stack(ranges)

    def _grid_costs(
        self, x: torch.Tensor, groups: Sequence[Group], steps: torch.Tensor, grid: torch.Tensor
    ) -> torch.Tensor:
        """Return each multiplier's cost over all columns, (j, 97), for steps (j, n)."""
        parts = zip(x, steps, groups, strict=True)
        costs = [_grid_cost(rows[: g.rows], step, g.half_range, grid) for rows, step, g in parts]
        return torch.stack(costs)

    def _best_codes(
        self,
        x: torch.Tensor,
        groups: Sequence[Group],
        row_weights: torch.Tensor,
        base: torch.Tensor,
        maxima: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each column's best scale code under each maximum (j, m), and its cost.

        x fp32 (j, r, n), base fp32 (j, n) → uint8 and fp32 (j, m, n).
        """
        share = EXPECTED_SHARE * base[:, None] / maxima[:, :, None].float()
        reach = torch.arange(-CODE_REACH, CODE_REACH + 1, device=x.device)
        levels = (SCALE_LEVELS * share.sqrt()).round()[:, :, None] + reach[:, None]
        codes = (levels.clamp(1, SCALE_LEVELS) - 1).to(torch.uint8)  # (j, m, reach, n)
        scales = self.decode_scales(codes, maxima[:, :, None].expand(codes.shape[:3])).float()
        cost = torch.stack(
            [
                _weighted_cost(
                    x[j, : g.rows], scales[j].flatten(0, 1), g.half_range, row_weights[j, : g.rows]
                )
                for j, g in enumerate(groups)
            ]
        )
        least, chosen = cost.view(codes.shape).min(dim=2)  # (j, m, n)
        return codes.gather(2, chosen[:, :, None])[:, :, 0], least

    def round_panel(
        self,
        rows: torch.Tensor,
        upper: torch.Tensor,
        scales: torch.Tensor,
        half_range: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round a panel's rows in order, and feed each row's error to the rows below it.

        Args:
            rows: fp32 (p, m), overwritten; p is at most `PANEL_ROWS`.
            upper: fp32 (p, p), the panel's diagonal block of the upper factor of H⁻¹; or (f, p, p).
            scales: fp32 (m,), decoder scale of each column.
            half_range: fp32 (m,), 2 ** (bits - 1) of each column.
            output: fp32 (blocks, b, b) with blocks · b = m, metric in which a row's error is
                minimized; None: the columns are independent.

        Returns:
            Codes uint8 (p, m), and errors over the factor's diagonal fp32 (p, m).
        """
        if upper.ndim == 3:
            own = _of_factors(len(upper), rows, scales, half_range, output)
            parts = [
                self.round_panel(x, u, *rest) for u, (x, *rest) in zip(upper, own, strict=True)
            ]
            return torch.cat([c for c, _ in parts], dim=1), torch.cat([e for _, e in parts], dim=1)
        row = descent_of(scales, half_range, output)
        rows = row.ordered(rows)
        divisors = torch.where(row.scales > 0, row.scales, torch.inf)  # scale 0: the zero point
        steps, errors = torch.empty_like(rows), torch.empty_like(rows)
        for r in range(rows.shape[0]):
            step = torch.div(rows[r], divisors, out=steps[r]).round_()
            torch.clamp(step, row.low, row.high, out=step)
            row.settle(step, rows[r])
            error = torch.sub(rows[r], (step * row.scales).half().float(), out=errors[r])
            error /= upper[r, r]
            rows[r + 1 :].addr_(upper[r, r + 1 :], error, alpha=-1)
        return row.restored(steps.sub_(row.low).to(torch.uint8)), row.restored(errors)

    def descend_panel(
        self,
        steps: torch.Tensor,
        gradient: torch.Tensor,
        hessian: torch.Tensor,
        scales: torch.Tensor,
        half_range: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Improve a panel's steps by coordinate descent on tr(O Eᵀ H E), row by row.

        Args:
            steps: fp32 (p, m), signed codes; overwritten; p is at most `PANEL_ROWS`.
            gradient: fp32 (p, m), H E O of the panel's rows; overwritten.
            hessian: fp32 (p, p), the panel's diagonal block of H; or (f, p, p).
            scales: fp32 (m,), decoder scale of each column.
            half_range: fp32 (m,), 2 ** (bits - 1) of each column.
            output: fp32 (blocks, b, b), O; None: the identity.

        Returns:
            The change of the panel's values, fp32 (p, m).
        """
        if hessian.ndim == 3:
            own = _of_factors(len(hessian), steps, scales, half_range, output, gradient)
            parts = [
                self.descend_panel(x, g, h, *rest)
                for h, (x, *rest, g) in zip(hessian, own, strict=True)
            ]
            return torch.cat(parts, dim=1)
        row = descent_of(scales, half_range, output)
        before, slopes = row.ordered(steps), row.ordered(gradient)
        improved = before.clone()
        for r, curvature in enumerate(hessian.diagonal().tolist()):
            pushed = row.descend(improved[r], slopes[r], curvature)
            slopes[r + 1 :].addr_(hessian[r + 1 :, r], pushed)
        change = torch.sub(improved, before).mul_(row.scales)
        steps.copy_(row.restored(improved))
        return row.restored(change)

    def pack(self, codes: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Pack codes uint8 (k, n) into words int32 (sum of rows * bits / 32, n).

        Bit `b * i` of a panel's integer begins code `i`.
        """
        n = codes.shape[1]
        parts = []
        for bits, start, stop in runs_of(groups):
            values = codes[start:stop].view(-1, PANEL_ROWS, n).int()
            packed = values.new_zeros(len(values), bits, n)
            for i, word, shift, spill in _places(bits):
                packed[:, word] |= values[:, i] << shift
                if spill:
                    packed[:, word + 1] |= values[:, i] >> (bits - spill)
            parts.append(packed.view(-1, n))
        return torch.cat(parts)

    def unpack(self, packed: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Invert `pack`: words int32 → codes uint8 (k, n)."""
        n = packed.shape[1]
        parts = []
        word_start = 0
        for bits, start, stop in runs_of(groups):
            count = (stop - start) * bits // 32
            values = packed[word_start : word_start + count].view(-1, bits, n)
            codes = values.new_empty(len(values), PANEL_ROWS, n, dtype=torch.uint8)
            for i, word, shift, spill in _places(bits):
                code = (values[:, word] >> shift) & ((1 << bits - spill) - 1)
                if spill:
                    code |= (values[:, word + 1] & ((1 << spill) - 1)) << (bits - spill)
                codes[:, i] = code
            parts.append(codes.view(-1, n))
            word_start += count
        return torch.cat(parts)

    def pack_scales(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack 4-bit scale codes uint8 (g, n) into int32 (g, n / 8), low nibble first."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
        nibbles = codes.int().view(codes.shape[0], -1, 8) << shifts
        return nibbles.sum(dim=2, dtype=torch.int32)

    def unpack_scales(self, packed: torch.Tensor) -> torch.Tensor:
        """Invert `pack_scales`: int32 (g, n / 8) → codes uint8 (g, n)."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
        codes = (packed[:, :, None] >> shifts) & 15
        return codes.view(packed.shape[0], -1).to(torch.uint8)

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, groups: Sequence[Group]
    ) -> torch.Tensor:
        """Return the matrix fp16 (k, n) for codes uint8 (k, n) and scales fp16 (g, n).

        Its elements are RN16((code - 2^(bits-1)) · scale).
        """
        matrix = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
        for index, group in enumerate(groups):
            rows = slice(group.start, group.start + group.rows)
            steps = codes[rows].float() - group.half_range
            matrix[rows] = (steps * scales[index].float()).half()
        return matrix

    def lay_out(
        self,
        words: torch.Tensor,
        groups: Sequence[Group],
        scales: torch.Tensor,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Convert a file's words to `PackedMatrix.words`; zero columns fill the last tile.

        Args:
            words: int32 (sum of rows * bits / 32, n).
            groups: of the result, in whole panels.
            scales: of whole tiles, from `lay_out_scales` or `pack_zeros`.
            order: int64 (k,), the file's row for each row, all of 4 bits; None: unchanged.
        """
        codes = self.unpack(words, groups)  # of one width, so any groups do
        codes = codes if order is None else codes[order]
        return packed.pack_blocks(
            packed.pack_codes(packed.whole_tiles(codes), groups), scales, groups
        )

    def lay_out_scales(self, words: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
        """Convert codes int32 (g, n / 8) and maxima fp16 (g,): see `packed.pack_scales`."""
        return packed.pack_scales(packed.whole_tiles(self.unpack_scales(words)), max_scales)

    def repeat(self, work: Callable[[], None], times: int) -> None:
        """Run the same work several times.

        Args:
            work: changes tensors in place; must not wait for the device or copy to it.
            times: how often.
        """
        for _ in range(times):
            work()

    def prepare(self) -> None:
        """Start to build the kernels for generation, which takes seconds, in a thread."""

    def prepare_rounding(self) -> None:
        """Start to build the kernels that round, likewise."""


TORCH_OPS = Ops()


def _of_factors(
    factors: int,
    rows: torch.Tensor,
    scales: torch.Tensor,
    half_range: torch.Tensor,
    output: torch.Tensor | None,
    *others: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the columns of each factor, as views: of rows (p, m), those of one row, blocks of O."""
    wide = (x.chunk(factors, dim=-1) for x in (rows, scales, half_range))
    blocks = [None] * factors if output is None else output.chunk(factors)
    yield from zip(*wide, blocks, *(x.chunk(factors, dim=-1) for x in others), strict=True)


@device_cache
def search_multiples(device: torch.device) -> torch.Tensor:
    """Return the multiples of the largest range to try as a maximum, fp32 (MAXIMA,)."""
    return sent(torch.linspace(MAXIMA_START, MAXIMA_END, MAXIMA), device)


def sample_step(n: int) -> int:
    """Return n when every n-th column beyond the widest judges the maximum."""
    return max(1, n // SAMPLED_COLUMNS)


def _sample(base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample (j, s) of the columns of base (j, n), and how many each represents, (s,)."""
    order = base.argsort(dim=1, descending=True, stable=True)
    step = sample_step(base.shape[1])
    sample = torch.cat([order[:, :WIDEST_COLUMNS], order[:, WIDEST_COLUMNS::step]], dim=1)
    weights = torch.full_like(base[0, : sample.shape[1]], step)
    weights[:WIDEST_COLUMNS] = 1
    return sample, weights


def _weighted_cost(
    x: torch.Tensor, scales: torch.Tensor, half: float, row_weights: torch.Tensor
) -> torch.Tensor:
    """Return Σ w (x - s clamp(rint(x / s)))² over the rows, fp32 (c, n), for scales (c, n)."""
    r, n = x.shape
    cost = torch.empty_like(scales)
    inverse = torch.where(scales > 0, 1 / scales, 0)
    width = max(1, CACHED_ELEMENTS // r)
    for begin in range(0, n, width):
        columns = slice(begin, begin + width)
        part = x[:, columns].contiguous()
        rounded = torch.empty_like(part)
        for index in range(len(scales)):
            torch.mul(part, inverse[index, columns], out=rounded).round_().clamp_(-half, half - 1)
            error = rounded.mul_(scales[index, columns]).sub_(part)
            torch.mv(error.square_().t(), row_weights, out=cost[index, columns])
    return cost


def _grid(device: torch.device) -> torch.Tensor:
    """Return the multipliers, fp32 (97,)."""
    t = torch.arange(GRID_POINTS, dtype=torch.float64, device=device) / (GRID_POINTS - 1)
    return (GRID_START * (1 - t) + GRID_END * t).float()


def _grid_cost(
    x: torch.Tensor, steps: torch.Tensor, half: float, grid: torch.Tensor
) -> torch.Tensor:
    """Return Σ |clamp(rint(x / (t p))) t p - x| ** 3.5 over a group for every multiplier p.

    Works on y = x / t: the sum over rows is the column's t ** 3.5 times that for y.
    """
    r, n = x.shape
    weights = steps.pow(GRID_EXPONENT)
    cost = torch.zeros(len(grid), dtype=torch.float32, device=x.device)
    multipliers = grid.tolist()
    width = max(1, CACHED_ELEMENTS // r)
    for begin in range(0, n, width):
        columns = slice(begin, begin + width)
        y = x[:, columns] / steps[columns]
        rounded, root = torch.empty_like(y), torch.empty_like(y)
        sums = torch.empty(len(multipliers), y.shape[1], dtype=y.dtype, device=y.device)
        for i, p in enumerate(multipliers):
            torch.mul(y, 1 / p, out=rounded).round_().clamp_(-half, half - 1)
            error = rounded.mul_(p).sub_(y).abs_()
            torch.sqrt(error, out=root)
            root.mul_(error).mul_(error).mul_(error)  # |e| ** 3.5
            torch.sum(root, dim=0, out=sums[i])
        cost += (sums * weights[columns]).sum(dim=1)
    return cost


def _places(bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (code index, word, shift, bits that spill into the next word) of a panel's codes."""
    for i in range(PANEL_ROWS):
        word, shift = divmod(bits * i, 32)
        yield i, word, shift, max(0, shift + bits - 32)
