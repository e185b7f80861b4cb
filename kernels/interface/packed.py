"""Packed matrices: the kernels' layout of a quantized matrix, repacked from the file on load.

Tiles of 32 columns, one after the other; in a tile, blocks of up to 4 panels of 32 rows and one bit
width, with the scales of their groups behind the codes. In each panel, a lane of a warp holds the
codes that it feeds to a tensor core as bytes; narrow ones share a byte.
`docs/concepts/decoding.md` draws it; `csrc/packed.cuh` reads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby, takewhile
from typing import NamedTuple

import torch
from torch.nn import functional

from exl2flow.kernels.interface.boxes import Boxes
from exl2flow.kernels.interface.groups import PANEL_ROWS, SCALE_LEVELS, Group
from exl2flow.kernels.interface.norm import NormArgs
from exl2flow.kernels.streams import device_cache, sent

TILE = 32  # columns
LANES = 32
BLOCK_PANELS, BLOCK_WORDS = 4, 512  # most panels of a block, and most words of their codes
SCALE_WORDS, ZERO_WORDS = 8, 32  # of a tile's scales in a group; of its scales and zeros in GPTQ
MOST_BESIDE = 192 << 20  # bytes of matrices that are decoded and multiplied together
FEW_ROWS = 64  # most rows for which a product reads the codes of a packed matrix directly
# registers whose codes lie below those of others, by bits and register: words, place in the byte
# and bits of each piece, the lowest first
SPREAD = {
    (3, 6): [(2, 0, 2), (1, 0, 1)],
    (3, 7): [(1, 1, 1), (0, 0, 2)],
    (5, 5): [(1, 0, 2), (0, 0, 3)],
    (5, 6): [(3, 0, 2), (2, 0, 3)],
    (5, 7): [(3, 2, 1), (1, 2, 1), (4, 0, 3)],
    (6, 6): [(2, 0, 2), (1, 0, 2), (0, 0, 2)],
    (6, 7): [(5, 0, 2), (4, 0, 2), (3, 0, 2)],
}
MOST_CODES = 1 << 22  # that are unpacked at once, 16 MiB as int32
# adjacent words of a lane
PIECES = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 8: [4, 4]}


class Panel(NamedTuple):
    """A panel of a matrix, and where a tile has it.

    word: of the tile, where its codes begin; group: its index; rest: panels behind it in its block;
    scales: word of the tile where the scales of its block begin; place: of its group among the
    `groups` whose scales the block has.
    """

    bits: int
    word: int
    group: int
    rest: int
    scales: int
    place: int
    groups: int


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class PackedMatrix:
    """A quantized matrix (k, columns) as kernels read it, padded to whole tiles.

    words: int32 (tiles, words): per block, the codes of its panels in row order, bits · 32 words
        each, then for each group the scales of 8 lanes: a nibble per column, and the fp16 unit
        above them; for GPTQ four fp16 scales and four fp16 zeros. See `pack_blocks`.
    order: int64 (k,), the in-feature of each row.
    has_zeros: whether it has scales and zeros as in GPTQ.
    bias: fp16 (columns,), added to a product; or None.
    """

    words: torch.Tensor
    groups: tuple[Group, ...]
    order: torch.Tensor
    columns: int
    has_zeros: bool = False
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.order), self.columns

    @property
    def scale_words(self) -> int:
        """Words of the scales per tile and group."""
        return ZERO_WORDS if self.has_zeros else SCALE_WORDS

    def panels(self) -> tuple[Panel, ...]:
        """Return all panels in row order."""
        return laid_panels(self.groups, self.scale_words)

    def cut(self, columns: int, bias: torch.Tensor | None = None) -> "PackedMatrix":
        """Return the matrix without its padding columns, with a bias."""
        return replace(self, columns=columns, bias=bias)


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class FusedLinear:
    """Multiply one x with matrices whose rows have the same order.

    norm: normalizes x first; or None.
    activation: of `ACTIVATIONS`; the result is then activation(x Q₀) · (x Q₁), or activation(x Q)
        of one matrix. Further matrices are `beside` these: they have results of their own.
    after: normalizes the result, if it is one; or None.
    multiplier: multiplies the result after that.
    adds: add the result, if it is one, to the hidden state; the sum is the next hidden state.
    exact: give results in fp32 as they are summed; only without activation, `after` and `adds`, at
        the end.
    is_ordered: x is given in the order of the rows; only without `norm`, as the first product.
    boxes: through which ranks add up the result, of which this one computes a part; only for
        `Ops.multiply_at_once`, if it `adds`, without `after`.
    gathers: through which ranks gather x, of which each has as many columns, in order; the same,
        only as the first product and if it `is_ordered`.
    """

    matrices: tuple[PackedMatrix, ...]
    norm: NormArgs | None = None
    activation: str | None = None
    after: NormArgs | None = None
    multiplier: float = 1.0
    adds: bool = False
    exact: bool = False
    is_ordered: bool = False
    boxes: Boxes | None = None
    gathers: Boxes | None = None

    @property
    def order(self) -> torch.Tensor:
        """The in-feature of each row, int64 (k,)."""
        return self.matrices[0].order

    @property
    def is_gated(self) -> bool:
        """Whether one matrix gates the other."""
        return self.activation is not None and len(self.matrices) > 1

    @property
    def main(self) -> tuple[PackedMatrix, ...]:
        """The matrices whose results the next product reads."""
        return self.matrices[:2] if self.is_gated else self.matrices

    @property
    def beside(self) -> tuple[PackedMatrix, ...]:
        """The others, which read the same x."""
        return self.matrices[len(self.main) :]

    def in_natural_order(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the product is given, (rows, k), in the order of in-features."""
        return torch.empty_like(x).index_copy_(1, self.order, x) if self.is_ordered else x


@lru_cache(maxsize=1024)
def laid_panels(groups: tuple[Group, ...], scale_words: int) -> tuple[Panel, ...]:
    """Return the panels of a matrix in row order; scale_words: per tile and group."""
    kinds = [
        (group.bits, index)
        for index, group in enumerate(groups)
        for _ in range(group.rows // PANEL_ROWS)
    ]
    panels: list[Panel] = []
    word = 0
    while len(panels) < len(kinds):
        bits, first = kinds[len(panels)]
        most = min(BLOCK_PANELS, BLOCK_WORDS // (LANES * bits))
        near = kinds[len(panels) : len(panels) + most]
        block = [*takewhile(lambda kind: kind[0] == bits, near)]  # noqa: B023  # used at once
        scales = word + LANES * bits * len(block)
        held = block[-1][1] + 1 - first
        for index, (_, group) in enumerate(block):
            at, rest = word + LANES * bits * index, len(block) - 1 - index
            panels.append(Panel(bits, at, group, rest, scales, group - first, held))
        word = scales + scale_words * held
    return tuple(panels)


@device_cache
def scale_places(
    groups: tuple[Group, ...], scale_words: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of a tile that are scales, and whose they are.

    Returns:
        int64 (g, scale_words) and (g,) in the order of blocks: a group that several blocks share
        comes once for each.
    """
    found = dict.fromkeys(
        (panel.scales + scale_words * panel.place, panel.group)
        for panel in laid_panels(groups, scale_words)
    )
    first, of_group = torch.tensor([*found]).T
    places = first[:, None] + torch.arange(scale_words)
    return sent(places, device), sent(of_group.contiguous(), device)


def pack_blocks(codes: torch.Tensor, scales: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """Return `PackedMatrix.words` of `pack_codes`, and of `pack_scales` or `pack_zeros`."""
    own, groups = scales.flatten(2), tuple(groups)
    places, of_group = scale_places(groups, own.shape[2], codes.device)
    words = codes.new_empty(len(codes), codes.shape[1] + places.numel())
    words[:, code_places(groups, own.shape[2])] = codes
    words[:, places] = own[:, of_group]
    return words


def code_places(groups: Sequence[Group], scale_words: int) -> torch.Tensor:
    """Return the words of a tile that are codes, int64, panels in row order."""
    panels = laid_panels(tuple(groups), scale_words)
    return torch.cat([torch.arange(p.word, p.word + LANES * p.bits) for p in panels])


def scales_apart(matrix: PackedMatrix) -> torch.Tensor:
    """Return the scales as from `pack_scales` or `pack_zeros`: int32 (tiles, g, words)."""
    places, of_group = scale_places(matrix.groups, matrix.scale_words, matrix.words.device)
    stored = matrix.words[:, places]
    scales = stored.new_empty(len(stored), len(matrix.groups), matrix.scale_words)
    scales[:, of_group] = stored
    return scales


@cache
def places(bits: int) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
    """Return the places of a lane's 32 codes: word, place, first bit and bits of each piece.

    Code `4 r + i` belongs to byte i of the lane's operand r = 4 m + 2 h + j: rows 4 h + i of its 8
    and column c = 2 m + j of its 4.
    """

    def pieces(r: int, i: int) -> Iterator[tuple[int, int, int, int]]:
        c, h, byte = r // 4 * 2 + r % 2, r // 2 % 2, 8 * i
        shared = _columns_of_byte(bits)
        place = byte + 8 - bits * (shared - c % shared)
        if (bits, r) in SPREAD:
            first = 0
            for word, low, width in SPREAD[bits, r]:
                yield word, byte + low, first, width
                first += width
        else:
            yield h if bits == 2 else r if shared == 1 else r // 2, place, 0, bits

    return tuple(tuple(pieces(r, i)) for r in range(8) for i in range(4))


@cache
def inverted(bits: int) -> tuple[int, ...]:
    """Return the bits of a lane's 32 codes that are stored inverted: the last code of a byte.

    It is then signed, without its zero point.
    """
    shared = _columns_of_byte(bits)
    columns = [r // 4 * 2 + r % 2 for r in range(8)]
    return tuple(0 if (c + 1) % shared else 1 << (bits - 1) for c in columns for _ in range(4))


def _columns_of_byte(bits: int) -> int:
    return {2: 4, 3: 2, 4: 2}.get(bits, 1)


def _owned(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column in a panel of all lanes' codes, each int64 (32 codes, 32 lanes)."""
    lane = torch.arange(LANES, device=device)
    m, h, j, i = (
        x.reshape(-1, 1)
        for x in torch.meshgrid(
            *(torch.arange(c, device=device) for c in (2, 2, 2, 4)), indexing="ij"
        )
    )
    return 8 * (lane % 4) + 4 * h + i, 16 * m + 8 * j + lane // 4


def pack_codes(codes: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """Lay out codes uint8 (k, n), n a multiple of 32: int32 (tiles, words), panels in row order."""
    _, n = codes.shape
    rows, columns = _owned(codes.device)
    parts = []
    for bits, start, stop in runs_of(groups):
        panels = codes[start:stop].view(-1, PANEL_ROWS, n // TILE, TILE).permute(2, 0, 1, 3)
        most = max(MOST_CODES // ((stop - start) * TILE), 1)  # tiles at once
        parts.append(
            torch.cat([_words_of(p[:, :, rows, columns], bits) for p in torch.split(panels, most)])
        )
    return torch.cat(parts, 1)


def _words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of lanes' codes (tiles, panels, 32 codes, lanes): int32 (tiles, words)."""
    codes = codes.int() ^ torch.tensor(inverted(bits), device=codes.device)[:, None].int()
    words = codes.new_zeros(*codes.shape[:2], bits, LANES)
    for word, place, first, mask in _pieces(bits).to(codes.device)[..., None]:
        part = codes.bitwise_right_shift(first).bitwise_and_(mask).bitwise_left_shift_(place)
        words.index_add_(2, word[:, 0], part)  # their bits are apart
    by_piece = torch.split(words, PIECES[bits], dim=2)
    return torch.cat([p.transpose(2, 3).flatten(2) for p in by_piece], 2).flatten(1)


def unpack_codes(matrix: PackedMatrix) -> torch.Tensor:
    """Invert `pack_codes`: codes uint8 (k, n), padding included."""
    packed = matrix.words[:, code_places(matrix.groups, matrix.scale_words)]
    rows, columns = _owned(packed.device)
    codes = packed.new_zeros(len(packed), len(matrix.order), TILE, dtype=torch.uint8)
    word = 0
    for bits, start, stop in runs_of(matrix.groups):
        count = (stop - start) // PANEL_ROWS
        run = packed[:, word : word + count * bits * LANES].view(len(packed), count, -1)
        word += count * bits * LANES
        panels = codes[:, start:stop].view(len(packed), count, PANEL_ROWS, TILE)
        most = max(MOST_CODES // ((stop - start) * TILE), 1)  # tiles at once
        for target, part in zip(torch.split(panels, most), torch.split(run, most), strict=True):
            target[:, :, rows, columns] = _codes_of(part, bits).transpose(2, 3)
    return codes.transpose(0, 1).flatten(1)


def _codes_of(run: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of all lanes, uint8 (tiles, panels, lanes, 32 codes)."""
    pieces = torch.split(run, [LANES * size for size in PIECES[bits]], dim=2)
    words = torch.cat([p.view(*p.shape[:2], LANES, -1) for p in pieces], 3)
    value = torch.tensor(inverted(bits), dtype=torch.int32, device=run.device)
    for word, place, first, mask in _pieces(bits).to(run.device):
        piece = words.index_select(3, word).bitwise_right_shift_(place).bitwise_and_(mask)
        value = piece.bitwise_left_shift_(first).bitwise_xor_(value)
    return value.byte()


@cache
def _pieces(bits: int) -> torch.Tensor:
    """Return int32 (pieces, 4, 32): word, place, first bit and mask of each code's pieces.

    A code that has fewer has masks of 0.
    """
    of_codes = places(bits)
    most = max(map(len, of_codes))
    rows = [[*((*p[:3], (1 << p[3]) - 1) for p in found)] for found in of_codes]
    filled = [row + [(0, 0, 0, 0)] * (most - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int32).permute(1, 2, 0).contiguous()


def pack_scales(codes: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
    """Lay out scale codes uint8 (g, n) and their maxima fp16 (g,): int32 (tiles, g, 8)."""
    units = (max_scales.float() / SCALE_LEVELS**2).half().view(torch.int16).int()
    nibbles = codes.view(len(codes), -1, 4, 8).int()
    words = units[:, None, None].bitwise_left_shift(16).expand(-1, nibbles.shape[1], 8).clone()
    for index in range(4):
        words |= nibbles[:, :, index].bitwise_left_shift(4 * index)
    return words.transpose(0, 1).contiguous()


def pack_zeros(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Lay out GPTQ scales and zeros fp16 (g, n): int32 (tiles, g, 8, 4)."""
    both = torch.stack([scales, zeros]).view(2, len(scales), -1, 4, 8)
    return both.permute(2, 1, 4, 0, 3).flatten(3).contiguous().view(torch.int32)


def decoded_scales(matrix: PackedMatrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales, and zeros if there are any, fp16 (g, n)."""
    stored = scales_apart(matrix)
    if matrix.has_zeros:
        halves = stored.view(torch.float16)
        both = halves.view(*halves.shape[:2], SCALE_WORDS, 2, 4).permute(3, 1, 0, 4, 2)
        scales, zeros = both.flatten(2)
        return scales, zeros
    shifts = 4 * torch.arange(4, device=stored.device)[:, None]
    words = stored.transpose(0, 1)
    levels = words[:, :, None].bitwise_right_shift(shifts).bitwise_and(15).float() + 1
    units = words[:, 0, 0].bitwise_right_shift(16).to(torch.int16).view(torch.float16).float()
    return (levels.square() * units[:, None, None, None]).half().flatten(1), None


def decode_packed(matrix: PackedMatrix) -> torch.Tensor:
    """Return a packed matrix as fp16 (k, columns), its rows in in-feature order."""
    scales, zeros = decoded_scales(matrix)
    rows = torch.tensor([group.rows for group in matrix.groups], device=scales.device)
    of_row = torch.arange(len(rows), device=scales.device).repeat_interleave(rows)
    halves = torch.tensor([group.half_range for group in matrix.groups], device=scales.device)
    lower = halves.half()[:, None].expand_as(scales) if zeros is None else zeros
    values = (unpack_codes(matrix).half() - lower[of_row]) * scales[of_row]
    return torch.empty_like(values).index_copy_(0, matrix.order, values)[:, : matrix.columns]


def whole_tiles(x: torch.Tensor) -> torch.Tensor:
    """Return rows (r, n), zero-padded until n is a multiple of 32."""
    return functional.pad(x, (0, -x.shape[1] % TILE))


def runs_of(groups: Sequence[Group]) -> Iterator[tuple[int, int, int]]:
    """Yield bits, first row and end of each run of groups of one bit width."""
    for bits, run in groupby(groups, key=lambda group: group.bits):
        members = list(run)
        yield bits, members[0].start, members[-1].start + members[-1].rows
