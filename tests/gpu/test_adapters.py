"""Adapters on a GPU: recorded steps are those that are launched, and those of a CPU."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from adapters import make_adapter
from decoding import GREEDY, Slots

from exl2flow.core.options.config import ConversionConfig
from exl2flow.inference import Adapter, Generator, LoadedModel, Request, load_model
from exl2flow.kernels.cuda.graphs import CudaGraph

pytestmark = pytest.mark.gpu

DEVICE, CACHE = "cuda", "fp16"
HALF = 2e-2  # relative error of logits after a few layers in fp16; an adapter changes them by 1
Used = tuple[Adapter, ...]


@pytest.fixture(scope="module")
def folder(qwen2: ConversionConfig) -> Path:
    return qwen2.out


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    ranks = (8, 5, 1, 16)
    return [
        make_adapter(root / str(seed), folder, rank=rank, alpha=rank / 2, seed=seed)
        for seed, rank in enumerate(ranks)
    ]


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, device=DEVICE)


@pytest.fixture(scope="module")
def adapters(folders: list[Path], model: LoadedModel) -> list[Adapter]:
    return [Adapter.load(each, model) for each in folders]


def prompts_of(model: LoadedModel, count: int) -> list[list[int]]:
    rows = torch.randint(2, model.spec.vocab_size, (count, 60)).tolist()
    return [row[: 3 + 7 * index % 57] for index, row in enumerate(rows)]


def entered(model: LoadedModel, texts: Sequence[Used], **options: object) -> Slots:
    """Return slots with prompts whose texts use adapters."""
    torch.manual_seed(0)
    slots = Slots(model, **{"slots": len(texts), "tokens": 128, "name": CACHE, **options})
    for slot, (used, ids) in enumerate(zip(texts, prompts_of(model, len(texts)), strict=True)):
        slots.enter(slot, ids, GREEDY, adapters=used)
    return slots


def check(found: Slots, expected: Slots, slots: Sequence[int]) -> None:
    for slot in slots:
        assert found.sampled[slot] == expected.sampled[slot]
        assert torch.equal(torch.stack(found.logits[slot]), torch.stack(expected.logits[slot]))


@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_a_replay_is_a_step(
    model: LoadedModel, adapters: list[Adapter], rows: int, graphs: list[CudaGraph]
) -> None:
    a, b, c, d = adapters
    texts = [((a,), (), (b, c), (d,), (b,), ())[slot % 6] for slot in range(rows)]
    recorded, launched = (entered(model, texts, launched=launched) for launched in (False, True))

    for slots in (recorded, launched):
        slots.run(20)

    assert len(graphs) == 2
    check(recorded, launched, range(rows))


def test_a_recording_follows_the_slots_adapters(
    model: LoadedModel, adapters: list[Adapter], graphs: list[CudaGraph]
) -> None:
    """Adapters come, go and take each other's places; texts without any are not touched."""
    a, b, c, _ = adapters
    texts = [(a,), (), (b,), (c,)]
    recorded, launched = (entered(model, texts, launched=launched) for launched in (False, True))
    changes: list[tuple[int, Used]] = [(2, ()), (3, (a, b)), (0, (c,)), (1, (b,)), (3, ()), (1, ())]
    ids = prompts_of(model, 1)[0]

    for slots in (recorded, launched):
        slots.run(4)
    for slot, used in changes:
        for slots in (recorded, launched):
            slots.enter(slot, ids, GREEDY, adapters=used)
            slots.run(4)
        check(recorded, launched, range(4))

    assert len(graphs) == 2


def test_a_wider_adapter_makes_new_recordings(
    model: LoadedModel, adapters: list[Adapter], graphs: list[CudaGraph]
) -> None:
    *_, narrow, wide = adapters
    recorded, launched = (
        entered(model, [(narrow,), ()], launched=launched) for launched in (False, True)
    )
    ids = prompts_of(model, 1)[0]

    for slots in (recorded, launched):
        slots.run(4)
        slots.enter(1, ids, GREEDY, adapters=(wide,))
        slots.run(4)
        slots.enter(0, ids, GREEDY)
        slots.enter(1, ids, GREEDY)
        slots.run(4)

    check(recorded, launched, range(2))
    assert len(graphs) == 4  # of samples, of two places of adapters, and of none


def test_steps_are_those_of_a_cpu(
    folder: Path, folders: list[Path], model: LoadedModel, adapters: list[Adapter]
) -> None:
    cpu = load_model(folder, device="cpu")
    on_cpu = [Adapter.load(each, cpu) for each in folders]
    texts = [(0,), (), (1, 3), (2,), (0, 1, 2, 3)]

    found, expected, plain = (
        entered(where, [tuple(given[i] for i in used) for used in chosen], name=name)
        for where, given, chosen, name in (
            (model, adapters, texts, CACHE),
            (cpu, on_cpu, texts, "fp32"),
            (cpu, on_cpu, [()] * len(texts), "fp32"),
        )
    )
    for slots in (found, expected, plain):
        slots.run(1)

    for slot, used in enumerate(texts):
        mine, theirs, without = (
            slots.logits[slot][0].double().cpu() for slots in (found, expected, plain)
        )
        assert (mine - theirs).norm() <= HALF * theirs.norm()
        assert not used or (theirs - without).norm() >= 10 * HALF * theirs.norm()


def test_texts_are_those_alone_beside_other_adapters(
    model: LoadedModel, adapters: list[Adapter]
) -> None:
    """Prompts are read in one pass, and jobs come and go; a near tie may exchange a token."""
    texts = [(), (0,), (1, 2), (3,), (), (2,), (0, 3), (1,)]
    requests = [
        Request(
            ids,
            max_new_tokens=24,
            settings=GREEDY,
            stops=(),
            tag=tag,
            logits=True,
            adapters=[adapters[i] for i in used],
        )
        for tag, (used, ids) in enumerate(zip(texts, prompts_of(model, 8), strict=True))
    ]

    def tokens_of(
        generator: Generator, *wanted: Request
    ) -> dict[object, list[tuple[int, torch.Tensor]]]:
        """Return the ids of each text, with the logits from which they were sampled."""
        found: dict[object, list[tuple[int, torch.Tensor]]] = {each.tag: [] for each in wanted}
        for event in generator.stream(*wanted):
            found[event.tag] += zip(event.ids, event.logits, strict=True)
        return found

    together = tokens_of(Generator(model, tokens=8192, slots=6), *requests)
    lonely = Generator(model, tokens=1024, slots=1)
    for request in requests:
        alone, compared = tokens_of(lonely, request)[request.tag], 0
        for (mine, logits), (theirs, expected) in zip(together[request.tag], alone, strict=True):
            assert (logits - expected).norm() <= HALF * expected.norm()
            compared += 1
            if mine != theirs:
                break  # a near tie, by the logits
        assert compared
