"""The cache's contents, and attention to it, on the GPU against the torch twins."""

import pytest
import torch
from caches import GPU_FORMATS

from exl2flow.kernels import CACHE_FORMATS, LayerStore, get_ops, slots_at, slots_of, torch_cache

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTHS = (0, 1, 17, 255, 256, 700)
PAGES = 3


def store_of(name: str, *, pages: int, kv_heads: int, head_dim: int) -> LayerStore:
    """Return a store filled with values that no kernel may read."""
    store = LayerStore.empty(
        CACHE_FORMATS[name], pages=pages, kv_heads=kv_heads, head_dim=head_dim, device=DEVICE
    )
    for rows in (store.keys, store.values):
        rows.data.fill_(255)
        rows.scales.fill_(float("nan"))
    return store


@pytest.mark.parametrize("shape", [(4, 64), (1, 64), (5, 24), (8, 128), (40, 64)])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_rows_are_stored_as_the_twin_stores_them(name: str, shape: tuple[int, int]) -> None:
    kv_heads, head_dim = shape
    found, expected = (
        store_of(name, pages=2, kv_heads=kv_heads, head_dim=head_dim) for _ in range(2)
    )
    slots = torch.randperm(512, device=DEVICE)[:100]
    k, v = torch.randn(2, 100, kv_heads, head_dim, device=DEVICE).half()
    k[3], v[5, 0] = 0, 60000.0

    get_ops(DEVICE).write_cache(found, slots, k, v)
    torch_cache.write_cache(expected, slots, k, v)

    for mine, twin in ((found.keys, expected.keys), (found.values, expected.values)):
        assert name != "fp16" or torch.equal(mine.data, twin.data)
        assert int((mine.data != twin.data).sum()) <= mine.data.numel() // 1000
        torch.testing.assert_close(mine.scales, twin.scales, rtol=2e-3, atol=0, equal_nan=True)
    for mine, twin in zip(
        torch_cache.read_cache(found, slots), torch_cache.read_cache(expected, slots), strict=True
    ):
        error = (mine.float() - twin.float()).norm() / twin.float().norm()
        assert error <= 1e-2


@pytest.mark.parametrize("shape", [(4, 64), (1, 64), (5, 24), (8, 128), (3, 15)])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_rows_are_read_as_the_twin_reads_them(name: str, shape: tuple[int, int]) -> None:
    store = store_of(name, pages=2, kv_heads=shape[0], head_dim=shape[1])
    slots = torch.randperm(512, device=DEVICE)[:100]
    torch_cache.write_cache(store, slots, *torch.randn(2, 100, *shape, device=DEVICE).half())
    order = slots[torch.randperm(100, device=DEVICE)]

    found = get_ops(DEVICE).read_cache(store, order)

    for mine, twin in zip(found, torch_cache.read_cache(store, order), strict=True):
        assert mine.shape == twin.shape
        torch.testing.assert_close(mine, twin, rtol=1e-3, atol=1e-3)  # other order of the same sum


def test_rows_at_an_odd_address_are_stored() -> None:
    found, expected = (store_of("fp16", pages=1, kv_heads=2, head_dim=64) for _ in range(2))
    slots = torch.randperm(256, device=DEVICE)[:9]
    k, v = (torch.randn(9 * 128 + 1, device=DEVICE).half()[1:].view(9, 2, 64) for _ in range(2))

    get_ops(DEVICE).write_cache(found, slots, k, v)
    torch_cache.write_cache(expected, slots, k, v)

    assert torch.equal(found.keys.data, expected.keys.data)
    assert torch.equal(found.values.data, expected.values.data)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (28, 4), (32, 2), (3, 3)])
@pytest.mark.parametrize("head_dim", [48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_a_new_token_attends_as_the_twin_does(
    name: str, head_dim: int, heads: tuple[int, int]
) -> None:
    (count, kv_heads), b, ops = heads, len(LENGTHS), get_ops(DEVICE)
    store = store_of(name, pages=b * PAGES, kv_heads=kv_heads, head_dim=head_dim)
    tables = torch.randperm(b * PAGES, device=DEVICE).view(b, PAGES).int()
    for table, length in zip(tables, LENGTHS, strict=True):
        k, v = torch.randn(2, length, kv_heads, head_dim, device=DEVICE).half()
        torch_cache.write_cache(store, slots_of(table, 0, length), k, v)
    q = torch.randn(b, 1, count, head_dim, device=DEVICE).half() * 2
    k, v = torch.randn(2, b, 1, kv_heads, head_dim, device=DEVICE).half()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    inputs = (q, k, v, store, tables, lengths)
    for window, softcap in ((None, None), (100, None), (None, 5.0)):
        options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}

        found = ops.paged_attention(*inputs, **options)

        expected = torch_cache.paged_attention(*inputs, **options)
        error = (found.float() - expected.float()).flatten(1).norm(dim=1)
        assert (error <= 2e-3 * expected.float().flatten(1).norm(dim=1)).all(), (window, softcap)
        assert torch.equal(ops.paged_attention(*inputs, **options), found)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_a_new_token_attends_to_many_parts_in_many_steps(
    name: str, head_dim: int, heads: tuple[int, int]
) -> None:
    (count, kv_heads), lengths, pages, ops = heads, (20_001, 5_000), 80, get_ops(DEVICE)
    store = store_of(name, pages=2 * pages, kv_heads=kv_heads, head_dim=head_dim)
    tables = torch.randperm(2 * pages, device=DEVICE).view(2, pages).int()
    for table, length in zip(tables, lengths, strict=True):
        k, v = torch.randn(2, length, kv_heads, head_dim, device=DEVICE).half()
        torch_cache.write_cache(store, slots_of(table, 0, length), k, v)
    q = torch.randn(2, 1, count, head_dim, device=DEVICE).half() * 2
    k, v = torch.randn(2, 2, 1, kv_heads, head_dim, device=DEVICE).half()
    inputs = (q, k, v, store, tables, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    for window in (None, 3_000):
        options = {"scale": head_dim**-0.5, "window": window}

        found = ops.paged_attention(*inputs, **options)

        expected = torch_cache.paged_attention(*inputs, **options)
        error = (found.float() - expected.float()).flatten(1).norm(dim=1)
        assert (error <= 2e-3 * expected.float().flatten(1).norm(dim=1)).all(), window
        assert torch.equal(ops.paged_attention(*inputs, **options), found)


def test_what_no_kernel_is_made_for_is_left_to_torch() -> None:
    store = store_of("q8", pages=2, kv_heads=2, head_dim=96)
    q, (k, v) = torch.randn(1, 3, 4, 96, device=DEVICE), torch.randn(2, 1, 3, 2, 96, device=DEVICE)
    tables = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    inputs = (q, k, v, store, tables, lengths)

    found = get_ops(DEVICE).paged_attention(*inputs, scale=0.1)

    assert torch.equal(found, torch_cache.paged_attention(*inputs, scale=0.1))


@pytest.mark.parametrize("heads", [(4, 4), (28, 4)])
@pytest.mark.parametrize(
    ("head_dim", "half"),
    [(64, 32), (128, 64), (128, 16), (96, 48), (80, 40), (80, 16), (256, 128)],
)
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_a_new_token_is_rotated_and_stored(
    name: str, head_dim: int, half: int, heads: tuple[int, int]
) -> None:
    (count, kv_heads), b, ops = heads, len(LENGTHS), get_ops(DEVICE)
    stores = [
        store_of(name, pages=b * PAGES, kv_heads=kv_heads, head_dim=head_dim) for _ in range(2)
    ]
    tables = torch.randperm(b * PAGES, device=DEVICE).view(b, PAGES).int()
    for table, length in zip(tables, LENGTHS, strict=True):
        k, v = torch.randn(2, length, kv_heads, head_dim, device=DEVICE).half()
        for store in stores:
            torch_cache.write_cache(store, slots_of(table, 0, length), k, v)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    slots = slots_at(tables, lengths.long()[:, None])[:, 0]
    q = torch.randn(b, 1, count, head_dim, device=DEVICE).half() * 2
    k, v = torch.randn(2, b, 1, kv_heads, head_dim, device=DEVICE).half()
    cos, sin = torch.rand(2, b, 1, 1, half, device=DEVICE)
    found, expected = (
        attend(q, k, v, store, tables, lengths, slots, cos, sin, scale=head_dim**-0.5)
        for attend, store in zip((ops.attend_step, torch_cache.attend_step), stores, strict=True)
    )

    error = (found.float() - expected.float()).flatten(1).norm(dim=1)
    assert (error <= 2e-3 * expected.float().flatten(1).norm(dim=1)).all()
    for mine, twin in zip(*(torch_cache.read_cache(s, slots) for s in stores), strict=True):
        assert (mine.float() - twin.float()).norm() <= 1e-2 * twin.float().norm()
