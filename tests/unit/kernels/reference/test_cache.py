"""The cache formats against loops over single elements, and attention that reads them."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from bounds import near
from caches import FORMATS

from exl2flow.kernels import (
    CACHE_FORMATS,
    PAGE_TOKENS,
    STEP_TOKENS,
    AttentionRule,
    LayerStore,
    StepCache,
    get_ops,
    slots_at,
    slots_of,
)
from exl2flow.kernels.interface.cache_formats import CacheRows, Element, padded_width
from exl2flow.kernels.reference.cache import decode, encode, hadamard

HEADS, DIM = 2, 64
ROTATED = (Element.ROTATED_8, Element.ROTATED_6, Element.ROTATED_4)
STEPS = {8: 128, 6: 128, 4: 8}  # of a scale in the largest element, by bits
# a step is 1/8, 1/32 or 1/128 of the largest of 32 rotated elements, and the last is truncated
MOST_ERROR = {
    Element.HALF: 0.0,
    Element.UPPER_BYTE: 0.25,
    Element.ROTATED_8: 0.02,
    Element.ROTATED_6: 0.08,
    Element.ROTATED_4: 0.3,
    Element.FULL: 0.0,
}
BITS = {
    "fp16": 16,
    "fp8": 8,
    "q8": 8.5,
    "q6": 6.5,
    "q8/q6": 7.5,
    "q8/q4": 6.5,
    "q6/q4": 5.5,
    "q4": 4.5,
    "fp32": 32,
}


def as_stored(element: Element, x: torch.Tensor) -> torch.Tensor:
    """Return rows as they read back from the cache."""
    data, scales = encode(element, x)
    rows = CacheRows(element=element, width=x.shape[1], data=data, scales=scales)
    return decode(rows, torch.arange(len(x)))


def walsh(values: list[float]) -> list[float]:
    """Return the Hadamard transform in natural order, not normalized."""
    if len(values) == 1:
        return values
    half = len(values) // 2
    first, last = walsh(values[:half]), walsh(values[half:])
    sums = [a + b for a, b in zip(first, last, strict=True)]
    return sums + [a - b for a, b in zip(first, last, strict=True)]


def stored_by_law(values: list[float], bits: int) -> tuple[list[int], list[float]]:
    """Return codes and scales of 64 elements, as `docs/concepts/cache.md` defines."""
    turned = [0.0] * 64
    turned[0::2], turned[1::2] = walsh(values[0::2]), walsh(values[1::2])
    center, codes, scales = 2 ** (bits - 1), [], []
    for begin in (0, 32):
        run = turned[begin : begin + 32]
        largest = max(map(abs, run))
        scales.append(float(torch.tensor(largest / STEPS[bits]).half()))
        steps = [round(y / largest * center) if largest else 0 for y in run]
        codes += [min(step + center, 2 * center - 1) for step in steps]
    return codes, scales


def codes_of(element: Element, stored: list[int]) -> list[int]:
    """Return the codes of a stored row."""
    if element is Element.ROTATED_8:
        return stored
    if element is Element.ROTATED_4:
        return [code for byte in stored for code in (byte & 15, byte >> 4)]
    codes = []
    for place in range(len(stored) // 48 * 64):
        quarter, of_quarter = divmod(place % 64, 16)
        unit = stored[place // 64 * 48 :][:48]
        upper = unit[of_quarter + 16 * (quarter // 2)] >> (0 if quarter % 2 else 4) & 15
        codes.append(upper << 2 | unit[32 + of_quarter] >> 2 * quarter & 3)
    return codes


@pytest.mark.parametrize("element", ROTATED)
def test_rotated_elements_are_stored_by_the_law(element: Element) -> None:
    x = torch.randn(5, 192).half()
    data, scales = encode(element, x)

    for row in range(5):
        for unit in range(3):
            values = x[row, 64 * unit : 64 * unit + 64].tolist()
            codes, expected = stored_by_law(values, element.bits)
            assert scales[row, 2 * unit : 2 * unit + 2].tolist() == expected
            found = codes_of(element, data[row].tolist())[64 * unit : 64 * unit + 64]
            # sums in another order occasionally move a value across the edge between two codes
            assert sum(a != b for a, b in zip(found, codes, strict=True)) <= 1
            assert max(abs(a - b) for a, b in zip(found, codes, strict=True)) <= 1


@pytest.mark.parametrize("element", ROTATED)
def test_rotated_elements_are_read_by_the_law(element: Element) -> None:
    x = torch.randn(5, 64).half()
    data, scales = encode(element, x)

    found = as_stored(element, x)

    center = 2 ** (element.bits - 1)
    for row in range(5):
        codes = codes_of(element, data[row].tolist())
        step = STEPS[element.bits] / center  # of scales
        turned = [(c - center) * step * float(scales[row, i // 32]) for i, c in enumerate(codes)]
        expected = torch.tensor([walsh(turned[0::2]), walsh(turned[1::2])]).T.flatten() / 32
        bound = near(expected, 1, dtype=torch.float16)  # as it is stored
        torch.testing.assert_close(found[row].float(), expected, **bound)


@pytest.mark.parametrize("element", ROTATED)
def test_the_largest_element_is_cut_off_and_zeros_stay_zeros(element: Element) -> None:
    x = torch.zeros(2, 64).half()
    x[0, 0] = 3.0  # all 32 rotated elements of the even places are 3
    data, scales = encode(element, x)

    half = 2 ** (element.bits - 1)
    assert codes_of(element, data[0].tolist())[:32] == [2 * half - 1, half] * 16
    assert scales[0].tolist() == [3 / STEPS[element.bits]] * 2
    assert scales[1].tolist() == [0, 0]
    assert as_stored(element, x)[1].eq(0).all()


def test_an_upper_byte_is_cut_off_towards_zero() -> None:
    x = torch.tensor([[1.24, -1.24, 0.0, -65504.0, 6e-8, math.inf]]).half()
    x = torch.cat([x, torch.zeros(1, 58).half()], dim=1)

    assert as_stored(Element.UPPER_BYTE, x)[0, :6].tolist() == [
        1.0,
        -1.0,
        0.0,
        -57344.0,
        0.0,
        math.inf,
    ]


def test_numbers_whose_rotation_overflows_fp16_stay_finite() -> None:
    x = torch.full((1, 64), 60000.0).half()
    for element in ROTATED:
        assert as_stored(element, x).isfinite().all()


@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("element", Element)
def test_every_width_comes_back(element: Element, width: int) -> None:
    x = torch.randn(7, width).half()
    found = as_stored(element, x)
    assert found.shape == x.shape
    error = torch.linalg.vector_norm((found - x).float()) / torch.linalg.vector_norm(x.float())
    assert float(error) <= MOST_ERROR[element]
    assert (float(error) > 0) == (element not in (Element.HALF, Element.FULL))


def test_rotation_spreads_an_outlier() -> None:
    x = torch.randn(64, 64).half() * 0.1
    x[:, 5] = 8.0
    plain = (x.float() / 8 * 8).round().clamp(-8, 7)  # the result of 4 bits without rotation
    rotated = (as_stored(Element.ROTATED_4, x) - x).float()
    assert rotated.square().mean() < 0.5 * (plain - x.float()).square().mean()


def test_hadamard_matrices_are_orthogonal_but_for_their_size() -> None:
    matrix = hadamard(32, torch.device("cpu"))
    assert torch.equal(matrix @ matrix, 32 * torch.eye(32))
    assert torch.equal(matrix @ torch.arange(32.0), torch.tensor(walsh(list(range(32)))).float())


@pytest.mark.parametrize(("name", "bits"), BITS.items())
def test_bytes_are_those_of_the_format(name: str, bits: float) -> None:
    store = LayerStore.empty(CACHE_FORMATS[name], pages=3, kv_heads=4, head_dim=32, device="cpu")
    assert store.nbytes == 3 * PAGE_TOKENS * 2 * 128 * bits / 8
    assert padded_width(65) == 128


def paged(name: str, lengths: list[int], pages: int) -> tuple[LayerStore, torch.Tensor, list]:
    """Return a store whose sequences use shuffled pages, their tables, and their contents."""
    store = LayerStore.empty(
        CACHE_FORMATS[name], pages=len(lengths) * pages, kv_heads=HEADS, head_dim=DIM, device="cpu"
    )
    tables = torch.randperm(len(lengths) * pages).view(len(lengths), pages).to(torch.int32)
    written = []
    for table, length in zip(tables, lengths, strict=True):
        k, v = torch.randn(2, length, HEADS, DIM).half()
        get_ops("cpu").write_cache(store, slots_of(table, 0, length), k, v)
        written.append((k, v))
    return store, tables, written


def step_cache(store: LayerStore, tables: torch.Tensor, lengths: list[int], new: int) -> StepCache:
    """Return the cache for a step of `new` tokens behind texts of these lengths."""
    held = torch.tensor(lengths, dtype=torch.int32)
    slots = slots_at(tables, held[:, None] + torch.arange(new))
    return StepCache(store=store, tables=tables, lengths=held, slots=slots)


def test_slots_follow_the_pages() -> None:
    table = torch.tensor([4, 1], dtype=torch.int32)
    found = slots_of(table, PAGE_TOKENS - 1, PAGE_TOKENS + 2)
    assert found.tolist() == [5 * PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1]


def test_keys_and_values_come_back_from_any_pages() -> None:
    store, tables, written = paged("fp16", [300, 5, 256], pages=2)
    for table, (k, v) in zip(tables, written, strict=True):
        found_k, found_v = get_ops("cpu").read_cache(store, slots_of(table, 0, len(k)))
        assert torch.equal(found_k, k)
        assert torch.equal(found_v, v)


def copied(rows: CacheRows) -> CacheRows:
    return replace(rows, data=rows.data.clone(), scales=rows.scales.clone())


def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return angles that leave heads as they are, for new tokens x (b, t, heads, head_dim)."""
    return torch.ones(x.shape[1], DIM // 2), torch.zeros(x.shape[1], DIM // 2)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads (t, heads, head_dim) by angles (t, half)."""
    half, cos, sin = cos.shape[-1], cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def attended(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return what each head of each new token sees, one after another, in fp64."""
    q, keys, values = q.double(), keys.double(), values.double()
    found, before, share = torch.empty_like(q), len(keys) - len(q), q.shape[1] // HEADS
    for token, head in itertools.product(range(len(q)), range(q.shape[1])):
        end = before + token + 1
        seen = slice(max(0, end - (window or end)), end)
        scores = keys[seen, head // share] @ q[token, head] * DIM**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        found[token, head] = scores.softmax(0) @ values[seen, head // share]
    return found


@pytest.mark.parametrize("new", [1, 3, STEP_TOKENS])
@pytest.mark.parametrize(
    ("share", "window", "softcap"),
    [(1, None, None), (3, 4, None), (4, 290, 2.0), (8, None, 5.0), (2, 1, None)],
)
@pytest.mark.parametrize("name", FORMATS)
def test_new_tokens_attend_to_all_as_it_is_stored(
    name: str, share: int, window: int | None, softcap: float | None, new: int
) -> None:
    lengths = [300, 0, 17, 253]
    store, tables, _ = paged(name, lengths, pages=2)
    q = torch.randn(4, new, share * HEADS, DIM)
    k, v = torch.randn(2, 4, new, HEADS, DIM)
    angles = torch.rand(4, new, DIM // 4)
    cos, sin = angles.cos(), angles.sin()
    rule = AttentionRule(scale=DIM**-0.5, window=window, softcap=softcap)
    cache = step_cache(store, tables, lengths, new)

    found = get_ops("cpu").attend_step(q, k, v, cache, cos[:, None], sin[:, None], rule=rule)

    for row, length in enumerate(lengths):
        keys, values = get_ops("cpu").read_cache(store, slots_of(tables[row], 0, length + new))
        turned_k = turned(k[row], cos[row], sin[row])
        for mine, computed, rows in ((keys, turned_k, store.keys), (values, v[row], store.values)):
            expected = as_stored(rows.element, computed.flatten(1)).view_as(computed)
            assert torch.equal(mine[length:], expected)
        turned_q = turned(q[row], cos[row], sin[row])
        expected = attended(turned_q, keys, values, window, softcap)
        bound = near(expected, DIM, len(keys))
        torch.testing.assert_close(found[row], expected.float(), **bound)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_at_once_attend_as_one_by_one(name: str, window: int | None) -> None:
    lengths = torch.tensor([250, 0], dtype=torch.int32)
    store, tables, _ = paged(name, lengths.tolist(), pages=2)
    other = LayerStore(
        keys=copied(store.keys), values=copied(store.values), kv_heads=HEADS, head_dim=DIM
    )
    new = STEP_TOKENS
    q, (k, v) = torch.randn(2, new, 3 * HEADS, DIM), torch.randn(2, 2, new, HEADS, DIM)
    cos, sin = torch.rand(2, 2, 1, new, DIM // 2)
    slots = slots_at(tables, lengths[:, None] + torch.arange(new))
    cache = StepCache(store=store, tables=tables, lengths=lengths, slots=slots)
    attend, options = get_ops("cpu").attend_step, {"rule": AttentionRule(scale=0.2, window=window)}

    found = attend(q, k, v, cache, cos, sin, **options)

    for i in range(new):
        one = (x[:, i : i + 1] for x in (q, k, v))
        angles = (x[:, :, i : i + 1].contiguous() for x in (cos, sin))
        later = replace(cache, store=other, lengths=lengths + i, slots=slots[:, i : i + 1])
        single = attend(*one, later, *angles, **options)
        # sums of products may be ordered by their shapes
        torch.testing.assert_close(single[:, 0], found[:, i], **near(found[:, i], DIM, 250 + new))
    for mine, theirs in ((store.keys, other.keys), (store.values, other.values)):
        assert torch.equal(mine.data[slots], theirs.data[slots])
        assert torch.equal(mine.scales[slots], theirs.scales[slots])


def test_neighbours_are_rotated_as_pairs() -> None:
    store, tables, _ = paged("fp32", [0], pages=1)
    q, (k, v) = torch.randn(1, 6, 3 * HEADS, DIM), torch.randn(2, 1, 6, HEADS, DIM)
    cos, sin = torch.rand(2, 6, DIM // 4)
    cache, rule = step_cache(store, tables, [0], 6), AttentionRule(scale=0.2)

    found = get_ops("cpu").attend_step(q, k, v, cache, cos, sin, rule=rule, interleaved=True)

    def neighbours(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x[..., : DIM // 2].reshape(*x.shape[:-1], DIM // 4, 2))
        rotated = pairs * torch.complex(cos, sin)[:, None]
        return torch.cat((torch.view_as_real(rotated).flatten(-2), x[..., DIM // 2 :]), dim=-1)

    mask = torch.ones(6, 6).tril().bool()
    one, two, three = (x[0].transpose(0, 1) for x in (neighbours(q), neighbours(k), v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        one[None], two[None], three[None], attn_mask=mask, scale=0.2, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(found[0], expected, **near(expected, DIM, 6))


@pytest.mark.parametrize("new", [1, 4])
def test_results_go_where_they_are_read(new: int) -> None:
    store, tables, _ = paged("fp16", [40, 0], pages=1)
    q, (k, v) = torch.randn(2, new, 3 * HEADS, DIM), torch.randn(2, 2, new, HEADS, DIM)
    cache = step_cache(store, tables, [40, 0], new)
    to, rule = torch.randperm(3 * HEADS * DIM).int(), AttentionRule(scale=0.2)
    plainly = get_ops("cpu").attend_step(q, k, v, cache, *plain(q), rule=rule)

    found = get_ops("cpu").attend_step(q, k, v, replace(cache, to=to), *plain(q), rule=rule)

    assert found.shape == plainly.shape
    for e, place in enumerate(to.tolist()):
        assert torch.equal(found.flatten(2)[..., place], plainly.flatten(2)[..., e])


def test_idle_rows_may_share_a_spare_page() -> None:
    store, tables, _ = paged("q8", [300, 0], pages=2)
    q, k, v = torch.randn(3, 3, 2, HEADS, DIM)
    rule, cache = AttentionRule(scale=0.1), step_cache(store, tables[[0, 1, 1]], [300, 0, 0], 2)

    found = get_ops("cpu").attend_step(q, k, v, cache, *plain(q), rule=rule)

    cache = step_cache(store, tables[:1], [300], 2)
    alone = get_ops("cpu").attend_step(q[:1], k[:1], v[:1], cache, *plain(q), rule=rule)
    assert torch.equal(found[:1], alone)
    assert found.isfinite().all()


def test_a_soft_cap_bounds_the_scores() -> None:
    store, tables, _ = paged("fp16", [0], pages=1)
    q = torch.full((1, 2, 2, DIM), 10.0)
    k = torch.stack([torch.full((HEADS, DIM), 10.0), torch.full((HEADS, DIM), -10.0)])[None]
    v = torch.stack([torch.ones(HEADS, DIM), torch.zeros(HEADS, DIM)])[None]
    cache, rule = step_cache(store, tables, [0], 2), AttentionRule(scale=1.0, softcap=0.5)

    found = get_ops("cpu").attend_step(q, k, v, cache, *plain(q), rule=rule)

    share = 1 / (1 + math.exp(-1.0))  # scores are 0.5 and -0.5
    assert found[0, 0].eq(1).all()
    torch.testing.assert_close(found[0, 1], torch.full((2, DIM), share))


def test_heads_without_positions_are_stored_as_they_are() -> None:
    store, tables, _ = paged("fp16", [5, 0], pages=1)
    q, (k, v) = torch.randn(2, 3, 2 * HEADS, DIM), torch.randn(2, 2, 3, HEADS, DIM)
    none, rule = torch.zeros(2, 1, 3, 0), AttentionRule(scale=DIM**-0.5)
    cache = step_cache(store, tables, [5, 0], 3)

    found = get_ops("cpu").attend_step(q, k, v, cache, none, none, rule=rule)

    for row, length in enumerate((5, 0)):
        keys, values = get_ops("cpu").read_cache(store, slots_of(tables[row], 0, length + 3))
        assert torch.equal(keys[length:], k[row].half())
        expected = attended(q[row], keys, values, None, None)
        bound = near(expected, DIM, len(keys))
        torch.testing.assert_close(found[row], expected.float(), **bound)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sinks_take_a_share_of_the_weights(softcap: float | None) -> None:
    store, tables, _ = paged("fp16", [9], pages=1)
    q, (k, v) = torch.randn(1, 2, 2 * HEADS, DIM), torch.randn(2, 1, 2, HEADS, DIM)
    sinks = torch.linspace(-2, 3, 2 * HEADS)
    cache = step_cache(store, tables, [9], 2)
    rule = AttentionRule(scale=DIM**-0.5, softcap=softcap)

    def found(rule: AttentionRule) -> torch.Tensor:
        return get_ops("cpu").attend_step(q, k, v, cache, *plain(q), rule=rule)[0]

    without, result = found(rule), found(replace(rule, sinks=sinks))

    keys, _ = get_ops("cpu").read_cache(store, slots_of(tables[0], 0, 11))
    for token, head in itertools.product(range(2), range(2 * HEADS)):
        scores = keys[: 10 + token, head // 2].float() @ q[0, token, head] * DIM**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        share = torch.sigmoid(scores.logsumexp(0) - sinks[head])
        expected = without[token, head] * share
        torch.testing.assert_close(result[token, head], expected, **near(expected, DIM, 11))
