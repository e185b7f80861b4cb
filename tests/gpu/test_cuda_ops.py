"""Every CUDA operation against its torch twin on the same device.

Torch fills fresh memory with NaN here, so that elements a kernel leaves unwritten show.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from roundings import whole_groups

from exl2flow.kernels import PANEL_ROWS, BegunGroups, Group, Ops, Scales, get_ops, run_concurrently
from exl2flow.kernels.reference.ops import TORCH_OPS

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable products
DEVICE = "cuda"
SHARE = 1e-5  # of codes that may differ: fp32 sums in another order decide near-ties


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` returns, and multiply matrices in full precision."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ops() -> Ops:
    return get_ops(DEVICE)


def check_codes(found: torch.Tensor, expected: torch.Tensor, *, share: float = SHARE) -> None:
    """Compare codes: a tiny share may differ."""
    differing = int((found != expected).sum())
    assert differing <= share * found.numel() + 1, f"{differing} of {found.numel()} codes differ"


def columns(r: int, n: int, *, j: int = 1) -> torch.Tensor:
    """Return groups fp32 (j, r, n) of columns that differ in size, one of them zero."""
    x = torch.randn(j, r, n, device=DEVICE) * (0.1 + torch.rand(j, 1, n, device=DEVICE))
    x[:, :, n // 2] = 0
    return x


def uneven_groups(x: torch.Tensor, bits: tuple[int, ...]) -> list[Group]:
    """Return groups of one width each, every second one half as long if that is allowed."""
    rows = x.shape[1]
    sizes = [rows, rows // 64 * 32 or rows]
    return [replace(g, rows=sizes[i % 2]) for i, g in enumerate(whole_groups(x, bits))]


def positive(*shape: int) -> torch.Tensor:
    """Return symmetric positive definite matrices fp32 (..., k, k) with strong correlations."""
    k = shape[-1]
    noise = torch.randn(*shape, max(1, k // 4), device=DEVICE)
    return noise @ noise.mT / noise.shape[-1] + 0.3 * torch.eye(k, device=DEVICE)


@pytest.mark.parametrize("search", ["grid", "column"])
@pytest.mark.parametrize("r", [32, 64, 128, 160])
@pytest.mark.parametrize("n", [8, 96, 129, 4128])
def test_beginning_groups(ops: Ops, r: int, n: int, search: str) -> None:
    bits = (2, 3, 4, 5, 6, 8)
    x, weights = columns(r, n, j=8), torch.rand(r, device=DEVICE) + 0.1
    rows = x.transpose(0, 1).reshape(r, -1)
    members = dict(zip((0, 2, 3, 4, 6, 7), uneven_groups(x[:6], bits), strict=True))

    def begin(each: Ops) -> tuple[torch.Tensor, ...]:
        codes = torch.full((1, 8, n), 77, dtype=torch.uint8, device=DEVICE)
        maxima, decoded = codes[:, :, 0].half(), codes.float()
        half = torch.zeros(8 * n, device=DEVICE)
        scales = Scales(codes=codes, maxima=maxima, decoded=decoded)
        each.begin_groups(rows, members, scales, half, weights if search == "column" else None)
        return codes, maxima, decoded, half

    found, expected = begin(ops), begin(TORCH_OPS)

    assert torch.equal(found[1], expected[1])
    check_codes(found[0], expected[0])
    same = found[0] == expected[0]
    assert torch.equal(found[2][same], expected[2][same])
    assert torch.equal(found[3], expected[3])


def panel(p: int, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows (p, m), the factor's block (p, p) inside a larger one, scales, half ranges."""
    upper = torch.linalg.cholesky(positive(2 * p), upper=True)[p // 2 : p // 2 + p][:, p // 2 :]
    half = 2.0 ** torch.randint(1, 8, (m,), device=DEVICE)
    scales = (torch.rand(m, device=DEVICE) + 0.5).mul(1.5 / half).half().float()
    scales[::17] = 0
    return torch.randn(p, m, device=DEVICE), upper[:, :p], scales, half


@pytest.mark.parametrize("p", [1, 7, 32])
@pytest.mark.parametrize("m", [8, 96, 129, 4128, 70000])
def test_a_panel_of_independent_columns(ops: Ops, p: int, m: int) -> None:
    rows, upper, scales, half = panel(p, m)

    codes, errors = ops.round_panel(rows.clone(), upper, scales, half)

    expected, other = TORCH_OPS.round_panel(rows.clone(), upper, scales, half)
    check_codes(codes, expected)
    same = (codes == expected).all(dim=0)
    torch.testing.assert_close(errors[:, same], other[:, same], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [1, 32])
@pytest.mark.parametrize(
    "shape", [(1, 4), (3, 32), (2, 96), (8, 256), (4, 512), (2, 1024), (1, 1056)]
)
def test_a_panel_in_a_metric(ops: Ops, p: int, shape: tuple[int, int]) -> None:
    blocks, b = shape
    output = positive(blocks, b)
    rows, upper, scales, half = panel(p, blocks * b)

    codes, errors = ops.round_panel(rows.clone(), upper, scales, half, output)

    expected, other = TORCH_OPS.round_panel(rows.clone(), upper, scales, half, output)
    # a code that differs moves the others of its block, and all rows below: only the first row's
    # can be compared
    check_codes(codes[:1], expected[:1], share=0.02)

    def size(e: torch.Tensor) -> float:
        split = e.double().view(p, blocks, b)
        return float((torch.einsum("pkb,kbc->pkc", split, output.double()) * split).sum())

    assert size(errors) == pytest.approx(size(other), rel=1e-2 if p > 1 else 1e-3)
    assert errors.isfinite().all()


@pytest.mark.parametrize("p", [1, 7, 32])
@pytest.mark.parametrize("shape", [(0, 4128), (3, 32), (2, 96), (8, 256), (4, 512), (2, 1024)])
def test_descent_of_a_panel(ops: Ops, p: int, shape: tuple[int, int]) -> None:
    blocks, b = shape
    m = max(1, blocks) * b
    output = positive(blocks, b) if blocks else None
    whole = torch.eye(m, device=DEVICE) if output is None else torch.block_diag(*output)
    target, _, scales, half = panel(p, m)
    hessian = positive(2 * p)[p // 2 : p // 2 + p, p // 2 : p // 2 + p]
    start = torch.where(scales > 0, target / scales, 0).round().clamp(-half, half - 1)

    def descend(each: Ops) -> tuple[torch.Tensor, torch.Tensor, float]:
        steps = start.clone()
        gradient = hessian @ (steps * scales - target) @ whole
        change = each.descend_panel(steps, gradient, hessian, scales, half, output)
        error = (steps * scales - target).double()
        return steps, change, float(((hessian.double() @ error @ whole.double()) * error).sum())

    steps, change, loss = descend(ops)

    expected, _, other = descend(TORCH_OPS)
    check_codes(steps, expected, share=0.02 if blocks else SHARE)
    assert loss == pytest.approx(other, rel=1e-3)
    torch.testing.assert_close(change, (steps - start) * scales)


@pytest.mark.parametrize("shape", [(0, 129), (0, 4128), (2, 96), (4, 256), (2, 1024)])
@pytest.mark.parametrize("rows", [(32, 32), (128, 64), (64, 0), (0, 160)], ids=str)
def test_refit_of_scales(ops: Ops, rows: tuple[int, int], shape: tuple[int, int]) -> None:
    blocks, b = shape
    n, r = max(1, blocks) * b, max(rows)
    output = positive(2 * blocks, b) if blocks else None
    whole = torch.eye(2 * n, device=DEVICE) if output is None else torch.block_diag(*output)
    groups = [Group(bits=4, start=0, rows=count) if count else None for count in rows]
    begun = BegunGroups.of(groups, torch.device(DEVICE, 0))
    hessian, target = positive(r), torch.randn(r, 2 * n, device=DEVICE)
    start = Scales(
        codes=torch.randint(0, 16, (r // PANEL_ROWS, 2, n), device=DEVICE).to(torch.uint8),
        maxima=(torch.rand(r // PANEL_ROWS, 2, device=DEVICE) + 0.5).half(),
        decoded=torch.empty(r // PANEL_ROWS, 2, n, device=DEVICE),
    )
    start.decoded.copy_(TORCH_OPS.decode_scales(start.codes[0], start.maxima[0]))
    steps = (target / start.decoded[0].view(-1)).round().clamp(-8, 7)
    gradient = hessian @ (steps * start.decoded[0].view(-1) - target)

    def refit(each: Ops) -> tuple[Scales, torch.Tensor]:
        found = Scales(
            codes=start.codes.clone(), maxima=start.maxima.clone(), decoded=start.decoded.clone()
        )
        return found, each.refit_scales(steps, gradient, hessian, begun, found, output)

    found, change = refit(ops)

    expected, other = refit(TORCH_OPS)
    assert torch.equal(found.maxima, expected.maxima)
    check_codes(found.codes, expected.codes)
    same = found.codes[0] == expected.codes[0]
    assert torch.equal(found.decoded[:, same], expected.decoded[:, same])
    torch.testing.assert_close(change[:, same.view(-1)], other[:, same.view(-1)])
    for j, count in enumerate(rows):
        columns = slice(j * n, (j + 1) * n)
        assert not change[count:, columns].any()
        moved = change[:, columns].double()
        slope = 2 * gradient[:, columns].double() + hessian.double() @ moved
        rise = ((slope @ whole[columns, columns].double()) * moved).sum()
        assert rise < 0 if count else rise == 0


MIXES = [(2,), (3,), (4,), (5,), (6,), (8,), (3, 2), (8, 4, 3), (6, 3, 2), (8, 6, 5, 4, 3, 2)]


@pytest.mark.parametrize("bits", MIXES, ids=str)
@pytest.mark.parametrize("n", [32, 96, 4128])
@pytest.mark.parametrize("k", [192, 4096, 20000])
def test_packing_and_decoding(ops: Ops, bits: tuple[int, ...], n: int, k: int) -> None:
    if k * n > 1 << 25 and len(bits) == 1:
        n = 32  # the large ones once per mix
    groups, start = [], 0
    for index, width in enumerate(bits):
        end = k if index == len(bits) - 1 else start + 32
        while start < end:
            rows = min(64 if index % 2 else 32, end - start)
            groups.append(Group(bits=width, start=start, rows=rows))
            start += rows
    codes = torch.empty(k, n, dtype=torch.uint8, device=DEVICE)
    for group in groups:
        part = codes[group.start : group.start + group.rows]
        part.random_(0, 2**group.bits)
    scales = (10.0 ** torch.empty(len(groups), n, device=DEVICE).uniform_(-8, 2)).half()

    packed = ops.pack(codes, groups)

    assert torch.equal(packed, TORCH_OPS.pack(codes, groups))
    assert torch.equal(ops.unpack(packed, groups), codes)
    assert torch.equal(ops.decode(codes, scales, groups), TORCH_OPS.decode(codes, scales, groups))


def test_results_are_the_same_in_every_run(ops: Ops) -> None:
    rows, upper, scales, half = panel(32, 4 * 512)
    output = positive(4, 512)

    first, second = (ops.round_panel(rows.clone(), upper, scales, half, output) for _ in range(2))

    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_repeated_work_is_that_of_a_loop(ops: Ops) -> None:
    x, h = torch.randn(256, 64, device=DEVICE), positive(256) / 256

    def work() -> None:
        x.addmm_(h, x.clone())

    expected = torch.matrix_power(h + torch.eye(256, device=DEVICE), 5) @ x
    work()
    ops.repeat(work, 4)

    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)


def test_many_recordings_beside_each_other(ops: Ops) -> None:
    h = positive(256) / 256
    starts = [torch.randn(256, 4096, device=DEVICE) for _ in range(2)]

    def work(x: torch.Tensor) -> torch.Tensor:
        ops.repeat(lambda: x.addmm_(h, x.clone()), 3)
        return x * 2  # not recorded

    expected = [work(x.clone()) for x in starts]

    for _ in range(40):  # more than torch has streams
        works = [partial(work, x.clone()) for x in starts]
        for found, one in zip(run_concurrently(works, h.device), expected, strict=True):
            assert torch.equal(found, one)


def test_kernels_follow_the_current_stream(ops: Ops) -> None:
    rows, upper, scales, half = panel(32, 70000)
    expected, _ = ops.round_panel(2 * rows, upper, scales, half)
    torch.cuda.synchronize()

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        found, _ = ops.round_panel(rows.mul_(2), upper, scales, half)
    torch.cuda.synchronize()

    assert torch.equal(found, expected)
