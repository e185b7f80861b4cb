"""Few tokens through the products between attentions: as sublayer after sublayer."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from caches import Sequences
from packed_models import LINKS, decoder_of, make_packed, quantized, sublayers_of
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE

from exl2flow.kernels import FEW_ROWS, Ops, StepCache, slots_of
from exl2flow.kernels.reference.cache import attend_step, read_cache
from exl2flow.model import DenseLinear, KvCache, ModelSpec, RopeTables, Sublayer
from exl2flow.model.layers.fused_chain import Chains
from exl2flow.model.layers.low_rank import with_low_rank
from exl2flow.model.layers.rope import at_layer


def one_by_one(
    sublayers: list[Sublayer],
    hidden: torch.Tensor,
    cache: KvCache | None = None,
    table: RopeTables | None = None,
) -> torch.Tensor:
    for sublayer in sublayers:
        index = sublayer.spec.layer_index
        layer = None if cache is None else cache.layer(index)
        hidden = sublayer(hidden, start=at_layer(table or 0, index), cache=layer)
    return hidden


def through(
    chains: Chains, hidden: torch.Tensor, cache: KvCache, table: RopeTables
) -> torch.Tensor:
    return chains(hidden, start=table, cache=cache)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float16
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= 2e-3  # fp16 results of fp32 sums


Made = Callable[[str], ModelSpec]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a packed model by its family, which is made once."""
    return cache(lambda family: make_packed(family, tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("family", LINKS)
def test_chains_compute_what_sublayers_compute_with_and_without_a_cache(
    family: str, packed: Made
) -> None:
    spec = packed(family)
    sublayers, hidden = sublayers_of(spec), torch.randn(2, 5, 64).half()
    mine, plain = (Sequences(spec, batch=2, tokens=64, name="fp16") for _ in range(2))

    chains = Chains.of(sublayers)

    assert chains is not None
    lengths = [*(len(link.chain) for link in chains.links), len(chains.last)]
    assert lengths == LINKS[family]
    close(chains(hidden), one_by_one(sublayers, hidden))
    for count in (4, 1, 3):
        hidden = torch.randn(2, count, 64).half()
        found = mine.read(partial(through, chains), hidden)
        close(found, plain.read(partial(one_by_one, sublayers), hidden))


@pytest.mark.parametrize(
    ("batch", "count", "is_ordered"), [(2, 1, True), (FEW_ROWS // 4, 4, True), (10, 7, False)]
)
@pytest.mark.parametrize("family", ["llama", "cohere", "glm4-moe", "gpt-oss"])
def test_attention_of_few_rows_writes_in_the_order_of_what_reads_it(
    family: str,
    batch: int,
    count: int,
    is_ordered: bool,
    packed: Made,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, orders = packed(family), list[torch.Tensor | None]()
    chains = Chains.of(sublayers_of(spec))
    assert chains is not None
    mine, plain = (Sequences(spec, batch=batch, tokens=64, name="fp16") for _ in range(2))

    def seen(*given: torch.Tensor | StepCache, **options: object) -> torch.Tensor:
        orders.append(given[3].to)
        return attend_step(*given, **options)

    monkeypatch.setattr(Ops, "attend_step", staticmethod(seen))
    for _ in range(2):
        hidden, found = torch.randn(batch, count, 64).half(), []
        for sequences, of in ((mine, chains), (plain, replace(chains, ordered=None))):
            found.append(sequences.read(partial(through, of), hidden, is_step=True))

        assert torch.equal(*found)
    leading = [*((link.runs, link.chain) for link in chains.links[1:])]
    readers = [
        runs[0].chain if runs else chain
        for runs, chain in (*leading, (chains.last_runs, chains.last))
    ]
    ways = [torch.argsort(chain[0].order) if is_ordered else None for chain in readers]
    for to, way in zip(orders[: len(ways)], ways, strict=True):
        assert to is way is None or torch.equal(to.long(), way)
    assert orders[len(ways) : 2 * len(ways)] == [None] * len(ways)


def test_the_hidden_state_that_comes_in_is_kept(packed: Made) -> None:
    chains = Chains.of(sublayers_of(packed("llama")))
    hidden = torch.randn(1, 3, 64).half()
    before = hidden.clone()
    assert chains is not None

    chains(hidden)

    assert torch.equal(hidden, before)


@pytest.mark.parametrize(("index", "name"), [(0, "k_proj"), (2, "o_proj"), (3, "down_proj")])
def test_a_dense_map_leaves_no_chains(index: int, name: str, packed: Made) -> None:
    sublayers = sublayers_of(packed("llama"))
    linears = sublayers[index].linears

    linears[name] = DenseLinear(linears[name].weight)

    assert Chains.of(sublayers) is None


def test_maps_whose_rows_lie_in_different_orders_make_no_chains(tmp_path: Path) -> None:
    spec = make_packed("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    projection = spec.sublayers[1].projections[1]
    other = quantized(projection.in_features, projection.out_features, torch.randperm(64))
    save_file(load_file(path) | other.to_tensors(projection.key), path)

    assert Chains.of(sublayers_of(spec)) is None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of what goes through chains from now on."""
    shapes: list[tuple[int, ...]] = []
    call = Chains.__call__

    def spied(self: Chains, hidden: torch.Tensor, **options: object) -> torch.Tensor:
        shapes.append(tuple(hidden.shape))
        return call(self, hidden, **options)

    monkeypatch.setattr(Chains, "__call__", spied)
    return shapes


def test_tokens_of_a_decoder_go_through_chains(packed: Made, seen: list[tuple[int, ...]]) -> None:
    spec = packed("qwen2")
    decoder, cache = decoder_of(spec), Sequences(spec, tokens=128, name="fp16")
    ids = torch.randint(0, VOCAB_SIZE, (1, FEW_ROWS + 3))

    many = decoder.hidden(ids)
    few = [cache.read(decoder.hidden, part) for part in ids.split([FEW_ROWS + 1, 1, 1], 1)]

    assert seen == [(1, count, 64) for count in (FEW_ROWS + 3, FEW_ROWS + 1, 1, 1)]
    close(torch.cat(few, 1), many)


@pytest.mark.parametrize(
    ("family", "is_packed"),
    [*((family, True) for family in LINKS), ("llama", False), ("cohere", False)],
)
def test_a_filled_cache_is_one_that_states_came_from(
    family: str, is_packed: bool, packed: Made
) -> None:
    spec = packed(family)
    decoder = decoder_of(spec, dtype=torch.float16 if is_packed else torch.float32)
    filled, plain = (Sequences(spec, tokens=64, name="fp16") for _ in range(2))
    filled.tables = plain.tables
    ids = torch.randint(0, VOCAB_SIZE, (1, 40))

    def fill(x: torch.Tensor, cache: KvCache, table: RopeTables) -> torch.Tensor:
        decoder.fill(x, cache, table)
        return x

    filled.read(fill, ids)
    plain.read(decoder.hidden, ids)

    slots = slots_of(plain.tables[0], 0, 40)
    for one, other in zip(filled.cache.stores, plain.cache.stores, strict=True):
        for x, y in zip(read_cache(one, slots), read_cache(other, slots), strict=True):
            assert torch.equal(x, y)


def test_a_decoder_of_fp32_has_no_use_for_chains(packed: Made, seen: list[tuple[int, ...]]) -> None:
    decoder = decoder_of(packed("llama"), dtype=torch.float32)

    assert decoder.embed(torch.zeros(1, 1, dtype=torch.int64)).dtype == torch.float32
    decoder.hidden(torch.zeros(1, 1, dtype=torch.int64))

    assert seen == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "cohere", "gemma2", "nemotron"])
def test_a_decoder_with_room_for_low_rank_products_uses_no_chains(
    family: str, packed: Made, seen: list[tuple[int, ...]]
) -> None:
    decoder = decoder_of(packed(family))
    made, parts = with_low_rank(decoder)
    ids = torch.randint(VOCAB_SIZE, (2, 3))

    found = made.hidden(ids)

    assert seen == []
    assert all(None not in part._products for part in parts)
    close(found, one_by_one(decoder.sublayers, decoder.embed(ids)))


def test_low_rank_products_are_added_to_those_of_packed_maps(packed: Made) -> None:
    decoder = decoder_of(packed("qwen2"))
    _, [part, *_] = with_low_rank(decoder)
    sublayer, x = decoder.sublayers[0], torch.randn(2, 3, 64).half()
    part.down, part.ups = part.room(5, x.dtype)
    projections = sublayer.spec.reading("input")
    matrices = {
        p.key: (torch.randn(2, 64).half() / 8, torch.randn(2, p.out_features).half())
        for p in projections[:2]
    }

    part.put(matrices, 1, 4)
    part.unused = torch.tensor([[True] * 5, [True, False, True, True, True]])[:, None, None]

    for p, y in zip(projections, part(x), strict=True):
        expected = sublayer.linears[p.name](x)
        if p.key in matrices:
            a, b = matrices[p.key]
            expected[1] += (x[1] @ a[:1].T) @ b[:1]
        close(y, expected)
