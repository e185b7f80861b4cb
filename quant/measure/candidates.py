"""The candidate quantization parameters.

A cell reads `bits/bits@share/share gSIZE/SIZE`; one size serves all widths of the cell. The tables
of sublayers are exllamav2's (`docs/format.md` section 5): a row sets all projections at once. The
options of single projections and of the head are this project's (`docs/concepts/quality.md`).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise

from exl2flow.core.options.config import HEAD_BITS, Preference
from exl2flow.model import Role, SublayerPart
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure.measurement import Candidate

ATTENTION_ROLES: tuple[Role, ...] = ("q", "k", "v", "o")
ATTENTION_TABLE = """
3/2@0.05/0.95 g64  | 3/2@0.05/0.95 g64  | 3/2@0.05/0.95 g64  | 3/2@0.05/0.95 g64
3/2@0.1/0.9 g64    | 3/2@0.1/0.9 g64    | 3/2@0.25/0.75 g64  | 3/2@0.1/0.9 g64
3/2@0.1/0.9 g64    | 3/2@0.1/0.9 g64    | 4/3@0.1/0.9 g128   | 3/2@0.1/0.9 g64
3/2@0.1/0.9 g64    | 3/2@0.1/0.9 g64    | 4/3@0.1/0.9 g128   | 4/3@0.1/0.9 g128
4/3@0.1/0.9 g128   | 4/3@0.1/0.9 g128   | 4/3@0.1/0.9 g128   | 4/3@0.1/0.9 g128
4/3@0.1/0.9 g128   | 4/3@0.1/0.9 g128   | 4/3@0.1/0.9 g64    | 4/3@0.1/0.9 g128
4 g128             | 4 g128             | 4 g128             | 4 g128
4 g128             | 4 g128             | 4 g64              | 4 g128
4 g64              | 4 g64              | 4 g32              | 4 g64
4 g32              | 4 g32              | 4 g32              | 4 g32
5/4@0.1/0.9 g128   | 5/4@0.1/0.9 g128   | 5/4@0.1/0.9 g64    | 5/4@0.1/0.9 g128
5/4@0.1/0.9 g64    | 5/4@0.1/0.9 g64    | 5/4@0.1/0.9 g32    | 5/4@0.1/0.9 g64
5/4@0.1/0.9 g64    | 5/4@0.1/0.9 g64    | 5 g64              | 5/4@0.1/0.9 g64
5/4@0.1/0.9 g32    | 5/4@0.1/0.9 g32    | 5 g32              | 5/4@0.1/0.9 g32
6/5@0.1/0.9 g128   | 6/5@0.1/0.9 g128   | 6 g128             | 6/5@0.1/0.9 g128
6/5@0.1/0.9 g32    | 6/5@0.1/0.9 g32    | 6 g32              | 6/5@0.1/0.9 g32
6 g128             | 6 g128             | 6 g128             | 6 g128
6 g32              | 6 g32              | 8 g32              | 6 g32
8 g128             | 8 g128             | 8 g128             | 8 g128
"""
MLP_ROLES: tuple[Role, ...] = ("gate", "up", "down")  # without gates, the others
MLP_TABLE = """
3/2@0.05/0.95 g64  | 3/2@0.05/0.95 g64  | 6/3/2@0.05/0.2/0.75 g32/64/64
3/2@0.1/0.9 g64    | 3/2@0.25/0.75 g64  | 6/3/2@0.05/0.2/0.75 g32/64/64
3/2@0.1/0.9 g64    | 3/2@0.3/0.7 g64    | 5/3@0.05/0.95 g32
3/2@0.1/0.9 g64    | 3/2@0.3/0.7 g64    | 5/4@0.05/0.95 g32
4/3@0.1/0.9 g128   | 4/3@0.25/0.75 g128 | 8/4/3@0.05/0.1/0.85 g32/128/128
4/3@0.1/0.9 g32    | 4/3@0.25/0.75 g32  | 8/4/3@0.05/0.1/0.85 g32
4/3@0.1/0.9 g32    | 4/3@0.25/0.75 g32  | 8/4@0.05/0.95 g32/128
4 g128             | 4 g32              | 8/4@0.05/0.95 g32/128
4 g32              | 4 g32              | 8/4@0.05/0.95 g32
5/4@0.1/0.9 g128   | 5/4@0.25/0.75 g128 | 8/5/4@0.05/0.1/0.85 g32/128/128
5/4@0.1/0.9 g32    | 5/4@0.25/0.75 g32  | 8/5/4@0.05/0.1/0.85 g32
6/5@0.1/0.9 g128   | 6/5@0.25/0.75 g128 | 8/6/5@0.05/0.1/0.85 g32/128/128
6/5@0.1/0.9 g32    | 6/5@0.25/0.75 g32  | 8/6/5@0.05/0.1/0.85 g32
6 g128             | 6 g128             | 8/6@0.05/0.95 g32/128
8/6@0.1/0.9 g128   | 8/6@0.1/0.9 g128   | 8/6@0.15/0.85 g128
8/6@0.1/0.9 g128   | 8/6@0.1/0.9 g128   | 8 g128
8 g128             | 8 g128             | 8 g128
"""
HEAD_TABLE = """
4/2@0.3/0.7 g32
4/3@0.15/0.85 g32
6/4@0.15/0.85 g32
6/5@0.15/0.85 g128
8/6@0.15/0.85 g128
8 g128
"""


def parse_params(text: str) -> QuantParams:
    """Read one table cell."""
    left, _, sizes = text.strip().partition(" g")
    widths, _, shares = left.partition("@")
    bits = tuple(map(int, widths.split("/")))
    groups = tuple(map(int, sizes.split("/")))
    return QuantParams(
        bit_widths=bits,
        proportions=tuple(map(float, shares.split("/"))) if shares else (1.0,),
        group_sizes=groups if len(groups) == len(bits) else groups * len(bits),
    )


ByRole = Mapping[Role, QuantParams]


def _parse_table(roles: tuple[Role, ...], table: str) -> tuple[ByRole, ...]:
    return tuple(
        dict(zip(roles, map(parse_params, line.split("|")), strict=True))
        for line in table.strip().splitlines()
    )


CANDIDATES: dict[str, tuple[ByRole, ...]] = {
    "attention": _parse_table(ATTENTION_ROLES, ATTENTION_TABLE),
    "mlp": _parse_table(MLP_ROLES, MLP_TABLE),
}
CANDIDATES["delta"] = tuple(  # values are a part of what the state keeps
    {"qkv": row["v"], "z": row["q"], "out": row["o"]} for row in CANDIDATES["attention"]
)


def _mixes(
    widths: tuple[int, ...], group_sizes: tuple[int, ...], shares: tuple[float, ...]
) -> Iterator[QuantParams]:
    """Yield every width alone, then each with shares of the next width above it."""
    for size in group_sizes:
        yield from (QuantParams.uniform(bits, size) for bits in widths)
        for lower, upper in pairwise(widths):
            for share in shares:
                yield QuantParams(
                    bit_widths=(upper, lower),
                    proportions=(share, 1 - share),
                    group_sizes=(size, size),
                )


def single_widths(options: Iterable[QuantParams]) -> list[tuple[int, int]]:
    """Return the distinct (bits, group size) that candidates are made of."""
    parts = (zip(p.bit_widths, p.group_sizes, strict=True) for p in options)
    return list(dict.fromkeys(chain.from_iterable(parts)))


FAST_GROUP = 128  # rows that share a scale where speed is preferred
PROJECTION_OPTIONS = tuple(_mixes((2, 3, 4, 5, 6, 8), (FAST_GROUP, 64, 32), (0.1, 0.25, 0.5, 0.75)))
HEAD_OPTIONS = tuple(_mixes((3, 4, 5, 6, 8), (128, 64), (0.15, 0.25, 0.5, 0.75)))
HEAD_PARAMS: dict[int, QuantParams] = dict(
    zip(HEAD_BITS, map(parse_params, HEAD_TABLE.strip().splitlines()), strict=True)
)


def is_allowed(prefer: Preference, candidate: Iterable[QuantParams]) -> bool:
    """Return whether bit allocation may choose these parameters of a slot.

    For speed all groups must have `FAST_GROUP` rows; only speed may choose 2 bits in such groups.
    """
    pairs = single_widths(candidate)
    if prefer == "quality":
        return (2, FAST_GROUP) not in pairs
    return all(size == FAST_GROUP for _, size in pairs)


def candidates_for(part: SublayerPart) -> tuple[Candidate, ...]:
    """Return the candidates of a part of a sublayer, in table order, for the projections it has."""
    roles = {p.role for p in part.projections}
    rows = next(rows for rows in CANDIDATES.values() if roles <= rows[0].keys())
    return tuple({p.name: row[p.role] for p in part.projections} for row in rows)
