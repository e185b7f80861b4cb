"""Where adapters are kept: tensors stay in place while there is room, and grow otherwise."""

from pathlib import Path

import pytest
import torch
from adapters import make_adapter
from bounds import near, terms_of

from exl2flow.engine.adapters import AdapterSlots
from exl2flow.inference import Adapter, LoadedModel, load_model
from exl2flow.model import DenseLinear, Sublayer
from exl2flow.model.layers.low_rank import LowRank

RANKS = (2, 4, 3, 2, 4)


@pytest.fixture(scope="module")
def adapters(
    source: Path, model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> list[Adapter]:
    # small: large ones give scores on which softmax has hardly any bound
    root = tmp_path_factory.mktemp("adapters")
    return [
        Adapter.load(make_adapter(root / str(seed), source, rank=rank, alpha=1, seed=seed), model)
        for seed, rank in enumerate(RANKS)
    ]


@pytest.fixture
def moves() -> list[str]:
    return []


@pytest.fixture
def slots(model: LoadedModel, moves: list[str]) -> AdapterSlots:
    return AdapterSlots(model.decoder, 4, moves.append)


def changed(sublayer: Sublayer, adapters: tuple[Adapter, ...]) -> Sublayer:
    """Add adapters to the weights of a sublayer, which is not loaded for anything else."""
    for p in sublayer.spec.projections:
        weight = sublayer.linears[p.name].weight.clone()
        for a, b in (adapter.matrices[p.key] for adapter in adapters):
            weight += b.T @ a
        sublayer.linears[p.name] = DenseLinear(weight)
    return sublayer


def check(slots: AdapterSlots, source: Path, *texts: tuple[Adapter, ...]) -> None:
    """Compare a step of the first slots, three tokens each, with models of merged weights."""
    ids = torch.randint(3, 300, (len(texts), 3))
    found = slots.for_slots(len(texts)).forward(ids)
    for row, used in enumerate(texts):
        merged = load_model(source, device="cpu").decoder
        for sublayer in merged.sublayers:
            changed(sublayer, used)
        expected = merged.forward(ids[row : row + 1])
        # fp32 rounds x W and x Aᵀ Bᵀ separately, or their sum: twice the terms
        bound = near(expected, 2 * terms_of(merged.spec, 3))
        torch.testing.assert_close(found[row : row + 1], expected, **bound)


def addresses(slots: AdapterSlots) -> list[int]:
    tensors = [x for part in slots._parts for x in (part.down, *part.ups) if x is not None]
    return [x.data_ptr() for x in (*tensors, *slots._unused.values())]


def test_without_adapters_the_decoder_is_the_model_itself(
    model: LoadedModel, slots: AdapterSlots, adapters: list[Adapter], moves: list[str]
) -> None:
    slots.enter(0)
    assert slots.for_slots(4) is model.decoder
    assert slots.for_texts([(), ()], [5, 6]) is model.decoder
    assert slots.mark == "plain"

    slots.enter(2, (adapters[0],))
    assert slots.for_slots(4) is not model.decoder
    assert slots.mark == "adapted"
    slots.enter(2)

    assert slots.for_slots(4) is model.decoder
    assert slots.mark == "plain"
    assert moves == ["adapted"]


def test_each_slot_uses_its_own_adapters(
    source: Path, slots: AdapterSlots, adapters: list[Adapter]
) -> None:
    a, b, c, *_ = adapters
    texts = ((a,), (), (b, c), (c,))
    for slot, used in enumerate(texts):
        slots.enter(slot, used)
    check(slots, source, *texts)

    slots.move(3, 1)
    slots.enter(3)
    check(slots, source, (a,), (c,), (b, c), ())


def test_tensors_stay_in_place_while_there_is_room(
    source: Path, slots: AdapterSlots, adapters: list[Adapter], moves: list[str]
) -> None:
    a, b, c, d, _ = adapters
    slots.enter(0, (b,))
    slots.enter(1, (a, c))
    slots.enter(2, (d,))
    before = addresses(slots)
    moves.clear()

    for used in ((a,), (b, c), (), (d, a), (c,)):
        slots.enter(2, used)
        check(slots, source, (b,), (a, c), used)

    assert addresses(slots) == before
    assert moves == []


def test_adapters_that_no_slot_uses_give_way(
    source: Path, slots: AdapterSlots, adapters: list[Adapter], moves: list[str]
) -> None:
    a, b, c, d, e = adapters
    slots.enter(0, (b,))
    slots.enter(1, (e,))
    before = addresses(slots)
    moves.clear()

    for used in (a, c, d, e, a, d):
        slots.enter(1, (used,))
        check(slots, source, (b,), (used,))

    assert addresses(slots) == before
    assert moves == []
    assert sorted(len(x.matrices) for x in slots._stored if x) == [14, 14]


def test_growth_keeps_what_slots_use(
    source: Path, slots: AdapterSlots, adapters: list[Adapter], moves: list[str]
) -> None:
    texts: list[tuple[Adapter, ...]] = []
    for slot, adapter in enumerate(adapters[:4]):
        texts.append((adapter,))
        slots.enter(slot, texts[-1])
        check(slots, source, *texts)

    assert moves == ["adapted"] * 3  # for 1, 2 and 4 adapters, where the second is the widest


def test_linears_that_no_adapter_changes_take_no_memory(
    source: Path, model: LoadedModel, slots: AdapterSlots, tmp_path: Path
) -> None:
    few = make_adapter(tmp_path / "few", source, linears=("q_proj", "v_proj"))
    every = make_adapter(tmp_path / "every", source, seed=5)
    slots.enter(0, (Adapter.load(few, model),))
    assert [part.down is not None for part in slots._parts] == [True, False, False, False] * 2

    slots.enter(1, (Adapter.load(every, model),))
    assert all(part.down is not None for part in slots._parts)


def test_a_pass_over_prompts_uses_the_adapters_of_each(
    source: Path, model: LoadedModel, slots: AdapterSlots, adapters: list[Adapter]
) -> None:
    a, b, c, *_ = adapters
    slots.enter(0, (b,))
    decoder = slots.for_texts([(a, c), (), (b,)], [1, 1, 1])
    part, x = decoder.sublayers[0].together["input"], torch.randn(1, 3, 64)

    found = part(x)

    for p, y in zip(model.spec.sublayers[0].reading("input"), found, strict=True):
        for token, used in enumerate([(a, c), (), (b,)]):
            expected = model.decoder.sublayers[0].linears[p.name](x[:, token])
            for down, up in (adapter.matrices[p.key] for adapter in used):
                expected = expected + x[:, token] @ down.T @ up
            torch.testing.assert_close(y[:, token], expected)
    check(slots, source, (b,))


@pytest.mark.parametrize("where", ["room", "put"])
def test_adapters_that_find_no_memory_leave_those_in_use_as_they_are(
    slots: AdapterSlots,
    adapters: list[Adapter],
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    slots.enter(0, (adapters[0],))
    plain, calls = getattr(LowRank, where), list[int]()

    def no_memory(self: LowRank, *given: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, *given)

    monkeypatch.setattr(LowRank, where, no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        slots.enter(1, (adapters[1], adapters[2]))
    slots.enter(1)

    check(slots, source, (adapters[0],), ())
    slots.enter(1, (adapters[1],))
    check(slots, source, (adapters[0],), (adapters[1],))
