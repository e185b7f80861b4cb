"""The tables of parameters: their sizes, their published bit costs, their groups at every width."""

from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from tiny import make_tiny

from exl2flow.core.options.config import HEAD_BITS
from exl2flow.model import QuantParams, resolve
from exl2flow.quant.measure.candidates import (
    CANDIDATES,
    HEAD_OPTIONS,
    HEAD_PARAMS,
    PROJECTION_OPTIONS,
    candidates_for,
    parse_params,
)

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 11008, 32000
# `docs/format.md` section 5: bits per weight at hidden 4096, intermediate 11008, vocabulary 32000
ATTENTION_BPW = (
    "2.1330 2.2150 2.4259 2.6720 3.1642 3.1681 4.0392 4.0470 4.0862 4.1332 4.1681 4.1936 4.4025 "
    "4.4594 5.3829 5.4594 6.0392 6.6332 8.0392"
)
MLP_BPW = (
    "2.2475 2.3256 2.5969 2.9128 3.2846 3.3681 3.6204 4.1386 4.1995 4.2672 4.3506 5.2498 5.3332 "
    "6.0724 6.3033 6.8692 8.0358"
)
HEAD_BPW = {2: "2.7354", 3: "3.2823", 4: "4.4385", 5: "5.1885", 6: "6.3448", 8: "8.0323"}
SHAPES = {
    "attention": dict.fromkeys(("q", "k", "v", "o"), (HIDDEN, HIDDEN)),
    "mlp": {
        "gate": (HIDDEN, INTERMEDIATE),
        "up": (HIDDEN, INTERMEDIATE),
        "down": (INTERMEDIATE, HIDDEN),
    },
}
ROWS = np.arange(32, 20_001, 32)
PRESETS = sorted(
    {p for rows in CANDIDATES.values() for row in rows for p in row.values()}
    | set(HEAD_PARAMS.values())
    | set(PROJECTION_OPTIONS)
    | set(HEAD_OPTIONS),
    key=str,
)


def bpw_column(kind: str) -> str:
    shapes = SHAPES[kind]
    numel = sum(k * n for k, n in shapes.values())
    return " ".join(
        f"{sum(row[name].total_bits(k, n) for name, (k, n) in shapes.items()) / numel:.4f}"
        for row in CANDIDATES[kind]
    )


def test_attention_candidates_cost_what_is_published() -> None:
    assert len(CANDIDATES["attention"]) == 19
    assert bpw_column("attention") == ATTENTION_BPW


def test_mlp_candidates_cost_what_is_published() -> None:
    assert len(CANDIDATES["mlp"]) == 17
    assert bpw_column("mlp") == MLP_BPW


def test_head_parameters_cost_what_is_published() -> None:
    found = {
        bits: f"{params.total_bits(HIDDEN, VOCABULARY) / (HIDDEN * VOCABULARY):.4f}"
        for bits, params in HEAD_PARAMS.items()
    }

    assert tuple(HEAD_PARAMS) == HEAD_BITS
    assert found == HEAD_BPW


@pytest.mark.parametrize(
    ("kind", "counts"), [("attention", [14, 14, 15, 14]), ("mlp", [13, 13, 14])]
)
def test_equal_cells_of_a_projection_are_one_variant(kind: str, counts: list[int]) -> None:
    variants = [len({row[name] for row in CANDIDATES[kind]}) for name in SHAPES[kind]]

    assert variants == counts


@pytest.mark.parametrize("options", [PROJECTION_OPTIONS, HEAD_OPTIONS])
def test_options_of_a_matrix_differ_and_none_leaves_out_a_width(
    options: tuple[QuantParams, ...],
) -> None:
    widths = (8, 6, 5, 4, 3, 2)

    assert len(set(options)) == len(options)
    for params in options:
        first = widths.index(params.bit_widths[0])
        assert params.bit_widths == widths[first : first + len(params.bit_widths)]


def test_options_of_a_projection_cover_all_rates_without_gaps() -> None:
    bpw = sorted(p.total_bits(HIDDEN, HIDDEN) / HIDDEN**2 for p in PROJECTION_OPTIONS)

    assert bpw[0] < 2.09
    assert bpw[-1] > 8.0
    assert max(b - a for a, b in pairwise(bpw) if b < 6) < 0.27


def test_options_of_the_head_reach_from_three_to_eight_bits() -> None:
    bpw = [p.total_bits(HIDDEN, VOCABULARY) / (HIDDEN * VOCABULARY) for p in HEAD_OPTIONS]

    assert (int(min(bpw)), int(max(bpw))) == (3, 8)


@pytest.mark.parametrize("params", PRESETS, ids=str)
def test_groups_and_bits_of_a_preset_hold_at_every_number_of_rows(params: QuantParams) -> None:
    rest, counts, stored = ROWS.copy(), [], np.zeros_like(ROWS)
    parts = zip(params.bit_widths, params.proportions, params.group_sizes, strict=True)
    for bits, share, size in parts:
        count = np.ceil(np.minimum(ROWS * share, rest) / size).astype(np.int64)
        stored += 64 * bits * np.clip(np.minimum(count * size, rest), 0, None)
        rest = rest - count * size
        counts.append(count)
    total = sum(counts)
    expected_bits = stored + 16 * total + 32 * total + 4 * total * 64 + 32 * ROWS

    found = np.array([params.group_counts(k) for k in ROWS.tolist()])

    assert (rest <= 0).all()
    assert min(count.min() for count in counts) >= 0
    assert np.array_equal(found, np.stack(counts, axis=1))
    assert [params.total_bits(k, 64) for k in ROWS.tolist()] == expected_bits.tolist()


@pytest.mark.parametrize("params", PRESETS, ids=str)
def test_groups_of_a_preset_cover_the_rows_with_falling_widths(params: QuantParams) -> None:
    for k in ROWS[::25].tolist():
        groups = params.groups(k)

        widths = [group.bits for group in groups]
        assert [widths.count(bits) for bits in params.bit_widths] == list(params.group_counts(k))
        assert widths == sorted(widths, reverse=True)
        assert [g.start for g in groups] == list(
            accumulate((g.rows for g in groups[:-1]), initial=0)
        )
        assert sum(g.rows for g in groups) == k


def test_a_cell_reads_widths_shares_and_sizes() -> None:
    assert parse_params("8/4/3@0.05/0.1/0.85 g32/128/128") == QuantParams(
        bit_widths=(8, 4, 3), proportions=(0.05, 0.1, 0.85), group_sizes=(32, 128, 128)
    )
    assert parse_params(" 4 g128 ") == QuantParams(
        bit_widths=(4,), proportions=(1.0,), group_sizes=(128,)
    )
    assert parse_params("5/3@0.05/0.95 g32").group_sizes == (32, 32)


def test_every_sublayer_has_parameters_for_each_of_its_projections(tmp_path: Path) -> None:
    spec = resolve(make_tiny("llama", tmp_path))

    for sublayer in spec.sublayers:
        (part,) = sublayer.parts
        rows = candidates_for(part)

        assert len(rows) == len(CANDIDATES[sublayer.kind])
        for row in rows:
            assert list(row) == [projection.name for projection in sublayer.projections]
