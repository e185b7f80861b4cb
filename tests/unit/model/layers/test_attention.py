import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bounds import near

from exl2flow.kernels import AttentionRule
from exl2flow.model.layers import attention, blockwise
from exl2flow.model.layers.attention import attend

HEADS, KV_HEADS, DIM = 6, 2, 8


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Loop over heads, queries and visible keys."""
    result = torch.zeros_like(q)
    count, positions = q.shape[-2], k.shape[-2]
    for h in range(HEADS):
        for i in range(count):
            last = positions - count + i
            first = 0 if window is None else max(0, last - window + 1)
            keys = k[0, h // (HEADS // KV_HEADS), first : last + 1]
            values = v[0, h // (HEADS // KV_HEADS), first : last + 1]
            weights = torch.softmax(keys @ q[0, h, i] * scale, dim=0)
            result[0, h, i] = weights @ values
    return result


@pytest.mark.parametrize("window", [None, 1, 4, 11, 12, 50])
@pytest.mark.parametrize(("count", "positions"), [(12, 12), (5, 12), (1, 12), (1, 1)])
def test_attention_equals_a_loop(count: int, positions: int, window: int | None) -> None:
    q = torch.randn(1, HEADS, count, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, positions, DIM)

    result = attend(q, k, v, AttentionRule(scale=0.3, window=window))

    expected = naive(q, k, v, scale=0.3, window=window)
    torch.testing.assert_close(result, expected, **near(expected, DIM, positions))


def test_full_rows_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a mask was made")

    monkeypatch.setattr("exl2flow.kernels.AttentionRule.visible", refuse)
    q = torch.randn(1, HEADS, 12, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, 12, DIM)

    attend(q, k, v, AttentionRule(scale=1.0))
    attend(q, k, v, AttentionRule(scale=1.0, window=12))
    attend(q[..., :1, :], k, v, AttentionRule(scale=1.0))


def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Return what a loop over heads and queries gives, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    found, before, share = torch.empty_like(q), k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    for head, i in itertools.product(range(q.shape[1]), range(q.shape[2])):
        end = before + i + 1
        places = slice(max(0, end - (rule.window or end)), end)
        scores = k[:, head // share, places] @ q[:, head, i, :, None] * rule.scale
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        weights = scores.exp()
        total = weights.sum(1, keepdim=True)
        if rule.sinks is not None:
            total = total + rule.sinks[head].double().exp()
        found[:, head, i] = (weights / total * v[:, head // share, places]).sum(1)
    return found


SINKS = torch.linspace(-2, 4, HEADS)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize(("count", "positions"), [(12, 12), (5, 12), (1, 12), (1, 1)])
@pytest.mark.parametrize("scores", [1, 70, 1 << 24])  # of a block: a query, some, all
def test_rules_without_a_fused_kernel_equal_a_loop(
    scores: int,
    count: int,
    positions: int,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blockwise, "SCORES", scores)
    q, (k, v) = torch.randn(2, HEADS, count, DIM), torch.randn(2, 2, KV_HEADS, positions, DIM)
    rule = AttentionRule(scale=0.3, window=window, softcap=softcap, sinks=sinks)

    result = attend(q, k, v, rule)

    assert result.dtype == torch.float32
    expected = seen(q, k, v, rule).float()
    torch.testing.assert_close(result, expected, **near(expected, DIM, positions))


def test_gradients_pass_a_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "SCORES", 70)
    q = torch.randn(1, HEADS, 9, DIM, requires_grad=True)
    k, v = (torch.randn(1, KV_HEADS, 12, DIM, requires_grad=True) for _ in range(2))
    rule = AttentionRule(scale=0.3, window=5, softcap=1.5)
    weights = torch.randn(1, HEADS, 9, DIM)

    found = torch.autograd.grad((attend(q, k, v, rule) * weights).sum(), (q, k, v))

    expected = torch.autograd.grad((seen(q, k, v, rule).float() * weights).sum(), (q, k, v))
    for mine, theirs in zip(found, expected, strict=True):
        # scores and their gradients; means of keys, and sums of the queries of three heads
        bound = near(theirs, 2 * DIM, 12, 3 * 9)
        torch.testing.assert_close(mine, theirs, **bound)


def test_halves_are_capped_in_fp32() -> None:
    q, k, v = (300 * torch.randn(1, 2, 3, DIM).half() for _ in range(3))  # products overflow fp16
    rule = AttentionRule(scale=1e-4, softcap=30.0)

    found = attend(q, k, v, rule)

    assert found.dtype == torch.float16
    expected = seen(q, k, v, rule)
    step = torch.finfo(torch.float16).eps  # fp32 sums that straddle a boundary
    bound = near(expected, DIM, 3) | {"rtol": step}
    torch.testing.assert_close(found, expected.half(), **bound)


@pytest.mark.parametrize("behind", [0, 3])
@torch.inference_mode()
def test_positions_that_all_queries_see_are_attended_to_separately(
    behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, int, bool]] = []

    def fused(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        def work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: Any, scale: float) -> Any:
            *_, is_causal, _ = how
            called.append((name, k.shape[2], is_causal))
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            scores = (q @ k.mT) * scale
            if is_causal:  # flash's is of the lower right, cuDNN's is of the upper left
                before = k.shape[2] - q.shape[2] if name == "flash" else 0
                hidden = torch.ones(scores.shape[-2:]).triu(1 + before).bool()
                scores = scores.masked_fill(hidden, -torch.inf)
            sums = scores.logsumexp(-1, keepdim=name == "cudnn")
            return scores.softmax(-1) @ v, sums

        return work

    ops = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=SimpleNamespace(default=fused("cudnn")),
        _scaled_dot_product_flash_attention=SimpleNamespace(default=fused("flash")),
    )
    monkeypatch.setattr(torch.ops, "aten", ops)
    q = torch.randn(1, HEADS, 4, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, 17 + behind, DIM)

    result = attention._attend_apart(q, k, v, 0.3, 13)

    monkeypatch.undo()
    expected = attend(q, k, v, AttentionRule(scale=0.3))
    torch.testing.assert_close(result, expected, **near(expected, DIM, 17 + behind))
    beside = ("cudnn", 4, True) if not behind else ("flash", 4 + behind, True)
    assert called == [beside, *(("cudnn", length, False) for length in (8, 4, 1))]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("scores", [1, 1 << 24])  # of a block: a query, all
@pytest.mark.parametrize(("count", "positions"), [(12, 12), (5, 12), (1, 12), (1, 9), (3, 4)])
def test_queries_see_their_own_chunk_only(
    count: int, positions: int, scores: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "SCORES", scores)
    q, (k, v) = torch.randn(2, HEADS, count, DIM), torch.randn(2, 2, KV_HEADS, positions, DIM)
    whole = AttentionRule(scale=0.3, softcap=softcap)

    result = attend(q, k, v, replace(whole, chunk=4))

    for place in range(positions - count, positions):
        begin, row = place // 4 * 4, place - (positions - count)
        keys, values = (x[:, :, begin : place + 1] for x in (k, v))
        expected = seen(q[:, :, row : row + 1], keys, values, whole).float()
        bound = near(expected, DIM, positions)
        torch.testing.assert_close(result[:, :, row : row + 1], expected, **bound)
