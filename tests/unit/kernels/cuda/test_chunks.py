"""Steps of attention within chunks: one launch per token, for the pages of its chunk."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from bounds import near

from exl2flow.kernels import CACHE_FORMATS, AttentionRule, LayerStore, StepCache, get_ops, slots_at
from exl2flow.kernels.cuda import cache as cuda_cache
from exl2flow.kernels.interface.cache_formats import PAGE_TOKENS, STEP_TOKENS
from exl2flow.kernels.reference import cache as torch_cache

HEADS, DIM, PAGES = 2, 16, 4
LENGTHS = (0, 255, 256, 700, 1022)


def step(new: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(len(LENGTHS), new, 2 * HEADS, DIM), *torch.randn(
        2, len(LENGTHS), new, HEADS, DIM
    )


def filled_cache(new: int) -> StepCache:
    count = len(LENGTHS) * (PAGES + 1)
    store = LayerStore.empty(
        CACHE_FORMATS["fp16"], pages=count, kv_heads=HEADS, head_dim=DIM, device="cpu"
    )
    slots = torch.arange(count * PAGE_TOKENS)
    torch_cache.write_cache(store, slots, *torch.randn(2, len(slots), HEADS, DIM))
    tables = torch.randperm(count).int().view(len(LENGTHS), PAGES + 1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    held = lengths[:, None] + torch.arange(new)
    return StepCache(store=store, tables=tables, lengths=lengths, slots=slots_at(tables, held))


@pytest.mark.parametrize("new", [1, 4, STEP_TOKENS])
@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("is_shared", [False, True])  # whether all rows have the same angles
def test_tokens_see_their_chunks(
    new: int, pages: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*given: Any, **options: Any) -> torch.Tensor:
        assert all(angles.is_contiguous() for angles in given[4:])
        return torch_cache.attend_step(*given, **options)

    monkeypatch.setattr(cuda_cache, "attend_step", attend)
    cache, (q, k, v) = filled_cache(new), step(new)
    shape = (new, DIM // 2) if is_shared else (len(LENGTHS), 1, new, DIM // 2)
    cos, sin = torch.rand(2, *shape)
    rule = AttentionRule(scale=0.3, chunk=pages * PAGE_TOKENS)

    found = cuda_cache._in_chunks(q, k, v, cache, cos, sin, rule=rule, interleaved=False)

    expected = get_ops("cpu").attend_step(q, k, v, cache, cos, sin, rule=rule)
    torch.testing.assert_close(found, expected, **near(expected, DIM, rule.chunk or 0))
    whole = get_ops("cpu").attend_step(q, k, v, cache, cos, sin, rule=replace(rule, chunk=None))
    assert not torch.allclose(found[-1], whole[-1], atol=1e-2)


@pytest.mark.parametrize(
    ("chunk", "way"),
    [
        (None, None),
        ((PAGES + 1) * PAGE_TOKENS, None),  # no text of the cache is longer
        (PAGE_TOKENS, cuda_cache._in_chunks),
        (PAGE_TOKENS + 1, torch_cache.attend_step),
    ],
)
def test_a_launch_is_left_out_only_where_it_would_be_wrong(chunk: int | None, way: object) -> None:
    q, rule = torch.zeros(5, 1, 4, DIM).half(), AttentionRule(scale=1.0, chunk=chunk)

    assert cuda_cache._other_way(q, filled_cache(1), rule) is way
