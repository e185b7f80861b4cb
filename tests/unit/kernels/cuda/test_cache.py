"""Launches of attention to a cache."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from caches import GPU_FORMATS
from product_walks import RTX_4090

from exl2flow.core.errors import ConfigError
from exl2flow.kernels import (
    CACHE_FORMATS,
    PAGE_TOKENS,
    STEP_TOKENS,
    AttentionRule,
    LayerStore,
    StepCache,
)
from exl2flow.kernels.cuda import cache as cuda_cache
from exl2flow.kernels.cuda.cache import (
    HEAD_STEP,
    LAUNCH_TOKENS,
    MOST_STAGES,
    SET,
    UNIT,
    WIDE_FROM,
    WIDTHS,
    _columns,
    _heads_together,
    _stages,
    _width,
    check_pages,
)
from exl2flow.kernels.cuda.compiler import ATTENTION_WARPS

ROOMS = (46 << 10, 81 << 10, 145 << 10, 209 << 10)


def test_pages_of_another_size_are_refused() -> None:
    check_pages(PAGE_TOKENS)
    with pytest.raises(ConfigError, match=r"`page_tokens` is 16; kernels .* pages of 256 tokens"):
        check_pages(16)


@pytest.mark.parametrize("head_dim", range(HEAD_STEP, 257, HEAD_STEP))
def test_every_head_lies_in_the_units_that_are_read(head_dim: int) -> None:
    width = _width(head_dim)

    ends = [kv * head_dim % UNIT + head_dim for kv in range(UNIT)]

    if width is None:
        assert max(ends) > WIDTHS[-1]
    else:
        assert max(ends) <= width


def test_common_heads_have_a_kernel_and_odd_ones_have_none() -> None:
    assert [_width(dim) for dim in (64, 80, 96, 128, 256)] == [64, 128, 128, 128, 256]
    assert _width(40) is None
    assert _width(512) is None


def bits_of(name: str) -> int:
    return CACHE_FORMATS[name].keys.bits + CACHE_FORMATS[name].values.bits


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_stages_fit(name: str, width: int, room: int) -> None:
    bits = bits_of(name)
    columns = {
        _columns(tokens, width, pairs, WIDE_FROM, is_coded=name.startswith("q"))
        for tokens, pairs in product((1, LAUNCH_TOKENS), (1, 4, 32))
    }
    for positions, count, members in product((1, 256, 8192), columns, (1, 2)):
        teams, stages, shared = _stages(
            bits, width, count, members=members, positions=positions, room=room
        )

        assert 1 <= teams <= ATTENTION_WARPS
        assert 1 <= stages <= MOST_STAGES
        assert shared <= room
        assert stages > 1 or positions < 8192
        assert shared // teams >= 4 * count * (width + 1)  # sums of values, a bank apart


@pytest.mark.parametrize("room", [-4096, 0, 2048, 6144])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_sums_fit_where_many_ctas_leave_no_room(name: str, width: int, room: int) -> None:
    for positions, count in product((1, 256), (SET, 2 * SET)):
        teams, stages, shared = _stages(
            bits_of(name), width, count, members=1, positions=positions, room=room
        )

        assert shared // teams >= 4 * count * (width + 1)
        assert stages <= MOST_STAGES


def columns_of(tokens: int, width: int, pairs: int, positions: int = WIDE_FROM) -> int:
    return _columns(tokens, width, pairs, positions, is_coded=False)


def test_several_new_tokens_have_two_sets_of_columns_where_that_saves_reading() -> None:
    assert [columns_of(1, 128, pairs) for pairs in (1, 8, 16)] == [SET] * 3
    wide = [columns_of(LAUNCH_TOKENS, 128, pairs) for pairs in (2, 8, 9, 32)]
    assert wide == [SET, SET, 2 * SET, 2 * SET]
    assert columns_of(LAUNCH_TOKENS, 128, 32, WIDE_FROM - 1) == SET
    assert columns_of(LAUNCH_TOKENS, 256, 32) == SET


def test_few_heads_of_one_token_have_as_few_columns_where_codes_are_stored() -> None:
    found = [_columns(1, 128, pairs, 1, is_coded=True) for pairs in range(1, 9)]

    assert found == [1, 2, 4, 4, SET, SET, SET, SET]
    assert _columns(1, 256, 1, 1, is_coded=True) == SET
    assert _columns(LAUNCH_TOKENS, 128, 1, 1, is_coded=True) == SET


def test_adjacent_key_heads_share_a_cta_if_their_rows_are_short_and_ctas_suffice() -> None:
    def found(pairs: int, bits: int, kv_heads: int, batch: int = 1) -> int:
        return _heads_together(pairs, bits, kv_heads, batch=batch, processors=132)

    assert [found(1, bits, 32) for bits in (4, 8)] == [4, 2]
    assert [found(4, bits, 8) for bits in (4, 8)] == [2, 2]
    assert [found(1, 4, kv_heads, 64) for kv_heads in (1, 2, 3, 4, 6)] == [1, 2, 1, 4, 1]
    assert found(1, 4, 6, 22) == 2  # 66 pairs, twice
    assert [found(1, 4, 4, batch) for batch in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(("bits", "together"), [(8, 2), (8, 4), (12, 2), (16, 2)])
def test_stages_of_several_heads_fit(bits: int, together: int, room: int) -> None:
    teams, stages, shared = _stages(
        bits, 128 * together, together, members=1, positions=8192, room=room
    )

    assert teams * stages * 16 * 128 * together * bits // 8 < shared <= room
    assert stages > 1
    assert shared // teams >= 4 * together * 128  # sums of values


@pytest.mark.parametrize(
    ("new", "counts"),
    [(1, [1]), (2, [2]), (LAUNCH_TOKENS, [8]), (9, [5, 4]), (13, [7, 6]), (STEP_TOKENS, [8, 8])],
)
def test_launches_divide_new_tokens_and_go_on_where_the_one_before_ended(
    new: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[str, np.void]]()

    def kept(file: str, name: str, grid: tuple[int, ...], call: np.void, **how: Any) -> None:
        made.append((name, call))

    monkeypatch.setattr(cuda_cache, "launch", kept)
    monkeypatch.setattr(cuda_cache, "limits", lambda device: RTX_4090)
    monkeypatch.setattr(cuda_cache, "_counters", lambda store, count: torch.zeros(count).int())
    form, heads, kv_heads, dim = CACHE_FORMATS["fp16"], 4, 2, 64
    store = LayerStore.empty(form, pages=6, kv_heads=kv_heads, head_dim=dim, device="cpu")
    cache = StepCache(
        store=store,
        tables=torch.arange(6, dtype=torch.int32).view(2, 3),
        lengths=torch.tensor([5, 300], dtype=torch.int32),
        slots=torch.arange(2 * new).view(2, new),
    )
    q = torch.zeros(2, new, heads, dim).half()
    k, v = torch.zeros(2, 2, new, kv_heads, dim).half()
    cos, sin = torch.zeros(2, 2, 1, new, dim // 2)

    out = cuda_cache.attend_step(q, k, v, cache, cos, sin, rule=AttentionRule(scale=1.0))

    assert [int(call["tokens"]) for _, call in made] == counts
    begin, most = 0, 1 if new == 1 else LAUNCH_TOKENS
    for (name, call), count in zip(made, counts, strict=True):
        assert name == f"attend<64, HALF, HALF, {most}, {SET}, 1>"
        assert (call["apart"], call["after"], call["angle_step"]) == (new, begin, new * dim // 2)
        assert call["lengths"] == cache.lengths.data_ptr()
        for field, x in (("q", q), ("k", k), ("v", v), ("out", out), ("slots", cache.slots)):
            assert call[field] == x[0, begin].data_ptr(), field
        for field, x in (("cosines", cos), ("sines", sin)):
            assert call[field] == x[0, 0, begin].data_ptr(), field
        begin += count
