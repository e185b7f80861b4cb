"""Attention of a partly cached prompt on a GPU: fused, compared with a mask."""

from dataclasses import replace

import pytest
import torch

from exl2flow.kernels import AttentionRule
from exl2flow.model.layers import attention, blockwise
from exl2flow.model.layers.attention import FAR_STEP, NEAR_STEP, attend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_tokens_behind_others_see_those_before_them(
    heads: tuple[int, int], dim: int, window: int | None
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, heads[0], 200, dim, device="cuda").half()
    k, v = torch.randn(2, 2, heads[1], 713, dim, device="cuda").half()

    rule = AttentionRule(scale=dim**-0.5, window=window)

    result = attend(q, k, v, rule)

    exact = attend(q.cpu().float(), k.cpu().float(), v.cpu().float(), rule)
    torch.testing.assert_close(result.cpu().float(), exact, atol=2e-3, rtol=2e-3)  # fp16 weights


def test_no_score_is_stored() -> None:
    q = torch.randn(1, 8, 2048, 128, device="cuda").half()
    k, v = torch.randn(2, 1, 2, 16384, 128, device="cuda").half()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    result = attend(q, k, v, AttentionRule(scale=0.1))

    assert torch.cuda.max_memory_allocated() - before < 3 * result.nbytes


@pytest.mark.parametrize("scores", [1 << 12, 1 << 24])  # of a block of queries
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("softcap", "window"), [(5.0, None), (5.0, 300), (50.0, 40), (None, 40)])
def test_caps_and_sinks_are_those_of_the_cpu(
    softcap: float | None,
    window: int | None,
    sinks: bool,
    dtype: torch.dtype,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blockwise, "SCORES", scores)
    q = 3 * torch.randn(2, 8, 200, 128, device="cuda").to(dtype)
    k, v = torch.randn(2, 2, 2, 713, 128, device="cuda").to(dtype)
    of_heads = torch.linspace(-3, 5, 8) if sinks else None
    rule = AttentionRule(scale=128**-0.5, window=window, softcap=softcap, sinks=of_heads)
    here = replace(rule, sinks=None if of_heads is None else of_heads.cuda())

    found = attend(q, k, v, here)

    exact = attend(q.cpu().float(), k.cpu().float(), v.cpu().float(), rule)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().float(), exact, atol=2e-3, rtol=2e-3)


def test_a_soft_cap_needs_little_memory_also_for_gradients() -> None:
    q = torch.randn(1, 8, 4096, 128, device="cuda", requires_grad=True)
    k, v = (torch.randn(1, 2, 4096, 128, device="cuda", requires_grad=True) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    result = attend(q, k, v, AttentionRule(scale=0.1, softcap=50.0))
    torch.autograd.grad(result.sum(), (q, k, v))

    whole = 4 * 8 * 4096**2  # bytes of all scores
    assert torch.cuda.max_memory_allocated() - before < whole


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("behind", [0, 700])  # positions that are left to the other kernel
@torch.inference_mode()
def test_what_all_tokens_of_a_piece_see_is_attended_to_apart(
    heads: tuple[int, int], dim: int, behind: int
) -> None:
    count, positions = NEAR_STEP, 3 * FAR_STEP + behind + NEAR_STEP
    q = torch.randn(1, count, heads[0], dim, device="cuda").half().transpose(1, 2)
    k, v = torch.randn(2, 1, positions, heads[1], dim, device="cuda").half().transpose(2, 3)
    q[..., :100, :] *= 8  # a few scores decide
    rule = AttentionRule(scale=dim**-0.5)
    assert attention._far(q, k, rule) == 3 * FAR_STEP

    found = attend(q, k, v, rule)

    exact = attend(q.cpu().float(), k.cpu().float(), v.cpu().float(), rule)
    assert found.stride() == q.stride()
    torch.testing.assert_close(found.cpu().float(), exact, atol=2e-3, rtol=2e-3)  # fp16 weights
    assert torch.equal(attend(q, k, v, rule), found)


@pytest.mark.parametrize("count", [96, 256, 1000])
@pytest.mark.parametrize("dim", [64, 80, 68, 256])
@pytest.mark.parametrize("window", [None, 40])
def test_gradients_are_those_of_the_cpu_and_the_same_again(
    count: int, dim: int, window: int | None
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, heads, count, dim) for heads in (4, 2, 2))
    q, k, v = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    rule = AttentionRule(scale=0.125, window=window)
    on_cpu = [x.cpu().requires_grad_() for x in (q, k, v)]
    y = attend(*on_cpu, rule)
    exact = torch.autograd.grad(y.square().sum() * 1e-9, on_cpu)
    found = []

    for _ in range(8):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = attend(*inputs, rule)
        found.append(torch.autograd.grad(y.square().sum() * 1e-9, inputs))

    for one, other in zip(found[0], exact, strict=True):
        assert float((one.cpu() - other).norm() / other.norm()) < 2e-3
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))
