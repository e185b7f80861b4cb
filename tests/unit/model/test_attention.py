import pytest
import torch

from exl2flow.model.attention import attend

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

    result = attend(q, k, v, scale=0.3, window=window)

    torch.testing.assert_close(result, naive(q, k, v, scale=0.3, window=window))


def test_full_rows_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a mask was made")

    monkeypatch.setattr("exl2flow.model.attention._visible", refuse)
    q = torch.randn(1, HEADS, 12, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, 12, DIM)

    attend(q, k, v, scale=1.0, window=None)
    attend(q, k, v, scale=1.0, window=12)
    attend(q[..., :1, :], k, v, scale=1.0, window=None)
