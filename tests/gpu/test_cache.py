"""The cache's contents, and attention to it, on the GPU against the torch twins."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import GPU_FORMATS, assert_near, ends_of_prompts
from pairs import pairs_of

from exl2flow.kernels import (
    CACHE_FORMATS,
    PAGE_TOKENS,
    STEP_TOKENS,
    AttentionRule,
    LayerStore,
    StepCache,
    get_ops,
    halved,
    slots_at,
    slots_of,
)
from exl2flow.kernels.cuda import cache as cuda_cache
from exl2flow.kernels.reference import cache as torch_cache

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LENGTHS = (0, 1, 17, 255, 256, 257, 700)
CASES = (  # new tokens, window, softcap
    (1, None, None),
    (1, 100, None),
    (1, None, 5.0),
    (2, 1, None),
    (3, None, 5.0),
    (4, 100, None),
    (5, 3, None),
    (7, None, None),
    (8, 100, 5.0),
    (8, None, None),
    (8, None, None),
    (8, 2, None),
    (9, None, None),
    (13, 100, None),
    (16, None, 5.0),
    (16, None, None),
    (16, 9, None),
)

DIMS = (  # of a head, and half of those that are rotated
    (48, 24),
    (64, 32),
    (80, 40),
    (80, 16),
    (96, 48),
    (128, 64),
    (128, 16),
    (128, 0),
    (256, 128),
)


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


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_a_page_of_all_layers_is_stored_and_read(name: str) -> None:
    stores = [store_of(name, pages=3, kv_heads=heads, head_dim=64) for heads in (1, 5)]
    parts = (x for store in stores for x in (store.keys, store.values))
    tensors = [x for part in parts for x in (part.data, part.scales) if x.numel()]
    tables = [x.view(torch.uint8).view(3, -1) for x in tensors]
    expected = [table.clone() for table in tables]
    nbytes = sum(table.shape[1] for table in tables)
    page = torch.randint(0, 256, (nbytes,), device=DEVICE).byte()

    get_ops(DEVICE).put_page(tables, 1, page)
    torch_cache.put_page(expected, 1, page)

    assert all(torch.equal(mine, twin) for mine, twin in zip(tables, expected, strict=True))
    assert torch.equal(get_ops(DEVICE).get_page(tables, 1), page)
    assert torch.equal(get_ops(DEVICE).get_page(tables, 2), torch_cache.get_page(tables, 2))


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


class Steps:
    """Sequences in a cache whose other contents are NaN, and random new tokens."""

    def __init__(
        self, name: str, *, heads: tuple[int, int], head_dim: int, lengths: Sequence[int], half: int
    ) -> None:
        count, kv_heads = heads
        b, self.new, self.lengths = len(lengths), STEP_TOKENS, list(lengths)
        pages = -(-(max(lengths) + self.new) // PAGE_TOKENS)
        self.store = store_of(name, pages=b * pages, kv_heads=kv_heads, head_dim=head_dim)
        self.tables = torch.randperm(b * pages, device=DEVICE).view(b, pages).int()
        for table, length in zip(self.tables, lengths, strict=True):
            k, v = torch.randn(2, length, kv_heads, head_dim, device=DEVICE).half()
            torch_cache.write_cache(self.store, slots_of(table, 0, length), k, v)
        self.q = torch.randn(b, self.new, count, head_dim, device=DEVICE).half() * 2
        self.k, self.v = torch.randn(2, b, self.new, kv_heads, head_dim, device=DEVICE).half()
        angles = 7 * torch.rand(b, 1, self.new, half, device=DEVICE)
        self.angles = angles.cos(), angles.sin()
        self.held = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        places = self.held.long()[:, None] + torch.arange(self.new, device=DEVICE)
        self.slots = slots_at(self.tables, places)
        self.to: torch.Tensor | None = None

    def step(self, begin: int, end: int, *, twin: bool = False, **rule: Any) -> torch.Tensor:
        """Return what the new tokens `begin` to `end` see; those before are in the cache."""
        ops = torch_cache if twin else get_ops(DEVICE)
        part = slice(begin, end)
        new = (x[:, part].contiguous() for x in (self.q, self.k, self.v))
        angles = (x[:, :, part].contiguous() for x in self.angles)
        given = AttentionRule(**{"scale": self.q.shape[-1] ** -0.5, **rule})
        cache = StepCache(
            store=self.store,
            tables=self.tables,
            lengths=self.held + begin,
            slots=self.slots[:, part].contiguous(),
            to=self.to,
        )
        return ops.attend_step(*new, cache, *angles, rule=given)

    def expected(self, end: int, **rule: Any) -> torch.Tensor:
        """Return what the first new tokens see of the cache as it is now, all of them in it."""
        cos, sin = (x[:, :, :end] for x in self.angles)
        q = torch_cache.rotate(self.q[:, :end].transpose(1, 2), cos, sin).transpose(1, 2)
        rows = []
        for table, length, of_row in zip(self.tables, self.lengths, q, strict=True):
            held = torch_cache.read_cache(self.store, slots_of(table, 0, length + end))
            keys, values = (x.float() for x in held)
            given = AttentionRule(**{"scale": q.shape[-1] ** -0.5, **rule})
            rows.append(torch_cache._attention(of_row.float(), keys, values, given))
        return torch.stack(rows)

    def new_rows(self, end: int) -> list[torch.Tensor]:
        """Return the bytes and scales of the first new tokens."""
        slots, rows = self.slots[:, :end], (self.store.keys, self.store.values)
        return [x[slots] for of in rows for x in (of.data, of.scales)]

    def forget(self) -> None:
        """Make the new rows NaN again."""
        for rows in (self.store.keys, self.store.values):
            rows.data[self.slots], rows.scales[self.slots] = 255, torch.nan


@pytest.mark.parametrize(
    ("name", "dims", "heads", "case"),
    pairs_of(
        GPU_FORMATS,
        DIMS,
        [(4, 4), (4, 2), (8, 1), (28, 4), (32, 2), (3, 3), (6, 2)],
        [*enumerate(CASES)],
    ),
)
def test_new_tokens_are_stored_and_attend_to_what_is_stored(
    name: str,
    dims: tuple[int, int],
    heads: tuple[int, int],
    case: tuple[int, tuple[int, int | None, float | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (head_dim, half), (index, (new, window, softcap)) = dims, case
    monkeypatch.setattr(cuda_cache, "WIDE_FROM", (1 << 14) * (index % 2))  # two sets, if it can
    steps = Steps(name, heads=heads, head_dim=head_dim, lengths=LENGTHS, half=half)
    written = Steps(name, heads=heads, head_dim=head_dim, lengths=LENGTHS, half=half)
    ops, (cos, sin) = get_ops(DEVICE), steps.angles
    k = ops.rotate(steps.k.transpose(1, 2), cos, sin).transpose(1, 2)
    ops.write_cache(written.store, written.slots.flatten(), k.flatten(0, 1), steps.v.flatten(0, 1))
    options = {"window": window, "softcap": softcap}

    found = steps.step(0, new, **options)

    assert_near(found, steps.expected(new, **options))
    for mine, other in zip(steps.new_rows(new), written.new_rows(new), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(steps.step(0, new, **options), found)


@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    pairs_of(GPU_FORMATS, [96, 128, 256], [(2, 2), (4, 2), (8, 2), (8, 4)]),
)
def test_new_tokens_attend_to_many_parts_in_many_steps(
    name: str, head_dim: int, heads: tuple[int, int]
) -> None:
    lengths, half = (20_001, 5_000, 4_095), head_dim // 2
    steps = Steps(name, heads=heads, head_dim=head_dim, lengths=lengths, half=half)
    for new, window in ((1, None), (1, 3_000), (3, None), (8, None), (8, 3_000), (16, None)):
        found = steps.step(0, new, window=window)

        assert_near(found, steps.expected(new, window=window), new, window)
        assert torch.equal(steps.step(0, new, window=window), found)


@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    pairs_of(GPU_FORMATS, [64, 80, 128, 256], [(4, 4), (8, 2), (16, 2)]),
)
def test_a_step_is_the_twins_step(name: str, head_dim: int, heads: tuple[int, int]) -> None:
    for new in (1, 2, 5, 8, 11, 16):
        steps = Steps(name, heads=heads, head_dim=head_dim, lengths=LENGTHS, half=head_dim // 2)
        found, mine = steps.step(0, new), steps.new_rows(new)

        expected = steps.step(0, new, twin=True)

        for ours, twin in zip(mine, steps.new_rows(new), strict=True):
            if ours.dtype == torch.uint8:  # sums in another order move an element by a code
                assert name != "fp16" or torch.equal(ours, twin)
                assert int((ours != twin).sum()) <= max(1, ours.numel() // 1000)
            else:
                torch.testing.assert_close(ours, twin, rtol=2e-3, atol=0)
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert float(error) <= 1e-2


@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    [
        *pairs_of(GPU_FORMATS, [48, 64, 80, 128, 256], [(3, 3), (4, 2), (28, 4), (32, 2)]),
        *product(["q8", "q4"], [128], [(3, 3), (8, 8), (4, 2), (16, 4), (6, 2), (32, 8)]),
    ],
)
def test_results_go_where_they_are_read(
    name: str, head_dim: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(name, heads=heads, head_dim=head_dim, lengths=LENGTHS, half=head_dim // 2)
    order = torch.randperm(heads[0] * head_dim, device=DEVICE)
    for new, wide_from in ((1, 1 << 14), (4, 1 << 14), (8, 0), (16, 0)):  # two sets, if it can
        monkeypatch.setattr(cuda_cache, "WIDE_FROM", wide_from)
        steps.to = None
        expected = steps.step(0, new).flatten(2)[..., order]

        steps.to = torch.argsort(order).int()
        assert torch.equal(steps.step(0, new).flatten(2), expected), new


@pytest.mark.parametrize(
    ("name", "head_dim", "heads", "window"),
    pairs_of(GPU_FORMATS, [64, 80, 128, 256], [(4, 4), (8, 2), (28, 4)], [None, 4]),
)
def test_tokens_at_once_attend_as_one_by_one(
    name: str, head_dim: int, heads: tuple[int, int], window: int | None
) -> None:
    steps = Steps(name, heads=heads, head_dim=head_dim, lengths=LENGTHS, half=head_dim // 2)
    single = torch.cat([steps.step(i, i + 1, window=window) for i in range(steps.new)], dim=1)
    rows = steps.new_rows(steps.new)
    steps.forget()

    found = steps.step(0, steps.new, window=window)

    assert_near(found, single)
    assert all(map(torch.equal, steps.new_rows(steps.new), rows))


@pytest.mark.parametrize(
    ("name", "head_dim", "heads", "softcap"),
    pairs_of(GPU_FORMATS, [64, 80, 128], [(4, 4), (28, 4), (32, 2), (6, 2)], [None, 5.0]),
)
def test_sinks_take_their_share(
    name: str, head_dim: int, heads: tuple[int, int], softcap: float | None
) -> None:
    lengths = (0, 17, 700, 5_000)
    steps = Steps(name, heads=heads, head_dim=head_dim, lengths=lengths, half=head_dim // 2)
    sinks = torch.linspace(-2, 6, heads[0], device=DEVICE)
    for new, window in ((1, None), (1, 128), (3, None), (8, 128), (16, 128)):
        rule = {"window": window, "softcap": softcap, "sinks": sinks}

        found = steps.step(0, new, **rule)

        assert_near(found, steps.expected(new, **rule), new, window)


def test_steps_of_any_sizes_take_turns_on_a_table() -> None:
    """Sums of parts are complete in all: none leaves another one's counters not zero."""
    lengths = (3_000, 2_500, 10)
    models = [
        Steps(name, heads=heads, head_dim=128, lengths=lengths, half=64)
        for name, heads in (("q8", (4, 2)), ("q4", (32, 8)))
    ]
    models[1].tables = models[0].tables
    for steps in models:  # contents at the pages of the common table
        for table, length in zip(steps.tables, lengths, strict=True):
            k, v = torch.randn(2, length, *steps.k.shape[2:], device=DEVICE).half()
            torch_cache.write_cache(steps.store, slots_of(table, 0, length), k, v)
        places = steps.held.long()[:, None] + torch.arange(steps.new, device=DEVICE)
        steps.slots = slots_at(steps.tables, places)
    for new in (1, 8, 2, 16, 1, 5, 13, 8):
        for steps in models:
            assert_near(steps.step(0, new), steps.expected(new), new)


@pytest.mark.parametrize("new", [8, 16])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_recording_counts_from_zero_however_often_it_runs(is_first: bool, new: int) -> None:
    steps, other = (
        Steps("q6", heads=(8, 2), head_dim=128, lengths=(3_000, 700), half=64) for _ in range(2)
    )
    (other if is_first else steps).step(0, new)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps.step(0, new)
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert_near(found, steps.expected(new))
        assert_near(steps.step(0, new), steps.expected(new))


@pytest.mark.parametrize("new", [1, 5, 16])
@pytest.mark.parametrize("half", [64, 32, 24])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_neighbours_are_rotated_as_pairs(name: str, half: int, new: int) -> None:
    stores = [store_of(name, pages=2, kv_heads=2, head_dim=128) for _ in range(2)]
    q = torch.randn(1, new, 8, 128, device=DEVICE).half()
    k, v = torch.randn(2, 1, new, 2, 128, device=DEVICE).half()
    tables = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(new, device=DEVICE)[None]
    angles = 7 * torch.rand(new, half, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    rule = AttentionRule(scale=0.1)
    caches = [
        StepCache(store=store, tables=tables, lengths=lengths, slots=slots) for store in stores
    ]

    found = get_ops(DEVICE).attend_step(q, k, v, caches[0], cos, sin, rule=rule, interleaved=True)

    near = (halved(x.transpose(1, 2), 2 * half).transpose(1, 2) for x in (q, k))
    expected = get_ops(DEVICE).attend_step(*near, v, caches[1], cos, sin, rule=rule)
    assert torch.equal(found, expected)
    for mine, theirs in zip(*((x.keys, x.values) for x in stores), strict=True):
        assert torch.equal(mine.data[slots], theirs.data[slots])


@pytest.mark.parametrize(("dtype", "new"), [(torch.float32, 3), (torch.float16, STEP_TOKENS + 1)])
def test_what_no_kernel_is_made_for_is_left_to_torch(dtype: torch.dtype, new: int) -> None:
    stores = [store_of("q8", pages=2, kv_heads=2, head_dim=96) for _ in range(2)]
    q = torch.randn(1, new, 4, 96, device=DEVICE, dtype=dtype)
    k, v = torch.randn(2, 1, new, 2, 96, device=DEVICE, dtype=dtype)
    tables = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(new, device=DEVICE)[None]
    cos, sin = torch.rand(2, new, 48, device=DEVICE)
    caches = [
        StepCache(store=store, tables=tables, lengths=lengths, slots=slots) for store in stores
    ]

    found, expected = (
        attend(q, k, v, cache, cos, sin, rule=AttentionRule(scale=0.1))
        for attend, cache in zip(
            (get_ops(DEVICE).attend_step, torch_cache.attend_step), caches, strict=True
        )
    )

    assert torch.equal(found, expected)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", GPU_FORMATS)
def test_ends_of_prompts_are_read_as_in_whole_prompts(
    name: str, window: int | None, tmp_path: Path
) -> None:
    for found, expected in ends_of_prompts(name, window, tmp_path, device=DEVICE):
        assert_near(found, expected)
