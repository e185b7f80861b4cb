"""A model whose layers lie on several devices, stood in for by `devices`: as on one device."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint
from cut import cut
from decoding import GREEDY, HOT, Again, Slots
from devices import Devices, device_of, devices
from packed_models import make_packed
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import FIRST_EMBEDDING
from exl2flow.engine.cache.paged import fitting
from exl2flow.engine.drafts import Draft, Drafter, NgramDraft
from exl2flow.engine.loading.layer_split import Split
from exl2flow.inference import (
    Adapter,
    Generator,
    LoadedModel,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.kernels.cuda import graphs as cuda_graphs
from exl2flow.model import (
    Decoder,
    DenseLinear,
    ModelSpec,
    Placement,
    TensorFiles,
    build_embedding,
    build_head,
    build_sublayer,
    resolve,
)
from exl2flow.model.memory.footprint import cache_bytes

A, B, C = (torch.device("cpu", index) for index in range(3))
LAYERS = 5
WHOLE = Placement.on(A, LAYERS)
PLACEMENTS = {
    "halves": Placement(embedding=A, layers=(A, A, A, B, B), head=B),
    "three": Placement(embedding=A, layers=(A, B, B, B, C), head=C),
    "ends alone": Placement(embedding=A, layers=(B,) * 5, head=C),
    "head first in order": Placement(embedding=C, layers=(C, A, A, A, A), head=B),
}
Generated = tuple[list[list[int]], list[torch.Tensor]]
TEXT = "The quick brown fox jumps over the lazy dog. Numbers such as 3.14 and 42"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("split") / "tiny",
        num_hidden_layers=LAYERS,
        max_position_embeddings=1024,
    )


@pytest.fixture
def fakes() -> Iterator[Devices]:
    with devices() as mode:
        yield mode


@pytest.fixture(scope="module")
def expected(folder: Path) -> Generated:
    """What a model on one device generates, without fakes."""
    return generated(generator_of(load_model(folder, device="cpu")))


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> Placement:
    return PLACEMENTS[request.param]


@cache
def loaded(folder: Path, placement: Placement) -> LoadedModel:
    return load_model(folder, device="cpu", placement=placement)


def generator_of(model: LoadedModel, draft: Drafter | None = None) -> Generator:
    return Generator(model, slots=3, tokens=1024, chunk=256, draft=draft)


def generated(generator: Generator) -> Generated:
    """Return ids and logits of several texts that begin alike, one after the other."""
    requests = [
        Request(TEXT * 9, max_new_tokens=5, settings=GREEDY, logits=True, seed=1),
        Request(TEXT, max_new_tokens=9, settings=HOT, logits=True, seed=2),
        Request((TEXT, "A"), max_new_tokens=4, settings=SamplingSettings(cfg_scale=1.5), seed=3),
        Request(TEXT * 9 + " more", max_new_tokens=3, settings=HOT, seed=4, logits=True),
    ]
    ids, logits = [[] for _ in requests], []
    for index, request in enumerate(requests):
        for event in generator.stream(request):
            ids[index] += event.ids
            logits += [token for token in event.logits if token is not None]
    return ids, logits


def record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record with `Again` from now on."""
    Again.made = []
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Again)
    begin = cuda_graphs.GraphPool.__init__
    monkeypatch.setattr(
        cuda_graphs.GraphPool,
        "__init__",
        lambda self, idle, *, device, **_: begin(self, idle, records=True, device=device),
    )


def packed(spec: ModelSpec, placement: Placement) -> Decoder:
    """Return a decoder as a GPU holds it."""
    tensors, how = TensorFiles(spec.source_dir), {"dtype": torch.float16}
    return Decoder(
        spec,
        embedding=build_embedding(spec, tensors, device=placement.embedding, **how),
        sublayers=[
            build_sublayer(
                spec, s, tensors, device=placement.layers[s.layer_index], packed=True, **how
            )
            for s in spec.sublayers
        ],
        head=build_head(spec, tensors, device=placement.head, packed=True, **how),
        placement=placement,
    )


def rated(model: LoadedModel) -> list[object]:
    """Return the scores of a prompt, and the model's own probabilities of the text after it."""
    wanted = {"scores": 3, "raw": True, "probabilities": True, "top_tokens": 2}
    request = Request(TEXT * 9, max_new_tokens=5, settings=HOT, seed=1, **wanted)
    events = [*generator_of(model).stream(request)]
    return [(e.scores, e.probabilities, e.top_ids) for e in events if e.scores or e.ids]


def same(found: Generated, expected: Generated) -> bool:
    pairs = zip(found[1], expected[1], strict=True)
    return found[0] == expected[0] and all(torch.equal(x, y) for x, y in pairs)


@torch.inference_mode()
def test_logits_are_those_of_one_device_and_states_cross_each_border_once(
    folder: Path, placement: Placement, fakes: Devices
) -> None:
    ids = torch.randint(0, 299, (2, 40))
    expected = loaded(folder, WHOLE).decoder.forward(ids)
    model = loaded(folder, placement)
    del fakes.moves[:]

    found = model.decoder.forward(ids)

    assert torch.equal(found.cpu(), expected.cpu())
    assert device_of(found) == placement.head
    borders = [*zip(placement.devices[:-1], placement.devices[1:], strict=True)]
    assert fakes.moves == [(*border, (2, 40, 64)) for border in borders]


def test_each_part_is_loaded_onto_its_device_in_order(
    folder: Path, placement: Placement, fakes: Devices
) -> None:
    done = list[tuple[int, int]]()

    decoder = load_model(
        folder, device="cpu", placement=placement, progress=lambda *part: done.append(part)
    ).decoder

    assert done == [(part, 12) for part in range(1, 13)]
    assert device_of(decoder.embedding.weight) == placement.embedding
    assert isinstance(decoder.head.linear, DenseLinear)
    assert device_of(decoder.head.linear.weight) == placement.head
    for sublayer in decoder.sublayers:
        where = placement.layers[sublayer.spec.layer_index]
        tensors = [x.weight for x in (*sublayer.linears.values(), *sublayer.norms.values())]
        assert {device_of(x) for x in tensors} == {where}


def test_a_tied_head_is_read_again_where_the_embedding_is_not(
    tmp_path: Path, fakes: Devices
) -> None:
    folder = make_tiny("llama", tmp_path / "tied", tie_word_embeddings=True)
    apart = Placement(embedding=A, layers=(A, A), head=B)

    split, whole = loaded(folder, apart).decoder, loaded(folder, Placement.on(A, 2)).decoder

    for decoder, is_shared in ((split, False), (whole, True)):
        assert isinstance(decoder.head.linear, DenseLinear)
        weight = decoder.head.linear.weight
        assert (weight.data_ptr() == decoder.embedding.weight.data_ptr()) == is_shared
        assert device_of(weight) == decoder.placement.head
    ids = torch.randint(0, 299, (1, 9))
    assert torch.equal(split.forward(ids).cpu(), whole.forward(ids).cpu())


@pytest.mark.parametrize("name", ["ends alone", "head first in order"])
def test_texts_and_logits_are_those_of_one_device(
    name: str, folder: Path, expected: Generated, fakes: Devices
) -> None:
    assert same(generated(generator_of(loaded(folder, PLACEMENTS[name]))), expected)


def test_a_cache_of_another_format_is_split_alike(folder: Path, fakes: Devices) -> None:
    request = Request(TEXT * 4, max_new_tokens=6, settings=GREEDY)

    ids, other = (
        [e.ids for e in Generator(loaded(folder, each), tokens=512, cache="q4").stream(request)]
        for each in (WHOLE, PLACEMENTS["three"])
    )

    assert ids == other


def test_scores_and_raw_probabilities_are_those_of_one_device(folder: Path, fakes: Devices) -> None:
    placements = PLACEMENTS["head first in order"], WHOLE

    found, expected = (rated(loaded(folder, each)) for each in placements)

    assert found == expected
    assert len(found) > 1


def test_recordings_of_steps_tails_and_copies_on_every_device_say_the_same(
    folder: Path, expected: Generated, fakes: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch)
    generator = generator_of(loaded(folder, PLACEMENTS["three"]))

    assert same(generated(generator), expected)

    tails = [TEXT * 9 + end for end in (" and", " or less")]
    generator.generate(tails, max_new_tokens=2, settings=GREEDY)
    for place in generator._device_slots.runner._places:
        assert {1, "tails", "copy"} <= {key[0] for key in place.graphs._graphs}


@torch.inference_mode()
def test_only_what_the_next_device_needs_is_sent(folder: Path, fakes: Devices) -> None:
    generator = generator_of(loaded(folder, PLACEMENTS["three"]))
    job = generator.submit(Request(TEXT * 12, max_new_tokens=20, settings=GREEDY))
    generator.step()
    del fakes.moves[:]
    generator.step()

    assert not job.is_decoding
    assert {move[:2] for move in fakes.moves} == {(A, B), (B, C)}  # nothing of a prompt comes back
    while not job.is_decoding:
        generator.step()
    for _ in range(3):
        generator.step()
    del fakes.moves[:]
    generator.step()

    assert not job.is_done
    assert fakes.moves == [
        (C, A, (1,)),
        (C, A, (1, 1)),
        (C, B, (1,)),  # lengths and ids, then lengths
        (A, B, (1, 64)),
        (B, C, (1, 64)),
    ]


def test_a_cut_on_one_device_is_run_as_a_border_is(folder: Path, fakes: Devices) -> None:
    models = [loaded(folder, each) for each in (cut(A, LAYERS), WHOLE)]
    first, _ = generators = [Generator(model, slots=1, tokens=256) for model in models]

    found, expected = (g.generate("A", max_new_tokens=3, settings=GREEDY) for g in generators)

    assert found == expected
    places = first._device_slots.runner._places
    assert [place.span.layers for place in places] == [range(2), range(2, LAYERS)]
    assert len({id(place.graphs) for place in places}) == 2


def test_pages_of_a_layer_are_where_the_layer_is(folder: Path, fakes: Devices) -> None:
    placement = PLACEMENTS["three"]

    stored = Generator(loaded(folder, placement), tokens=512).states.stored

    assert [device_of(x) for x in stored] == [d for d in placement.layers for _ in range(2)]


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafts_change_no_text(
    folder: Path, draft: str, expected: Generated, fakes: Devices
) -> None:
    model = loaded(folder, PLACEMENTS["halves"])
    guesses = NgramDraft(tokens=3)
    if draft == "model":
        guesses = Draft(model=loaded(folder, Placement.on(B, LAYERS)), tokens=3)

    request = Request(TEXT, max_new_tokens=9, settings=HOT, seed=2)  # as in `generated`

    events = [*generator_of(model, guesses).stream(request)]

    assert [token for event in events for token in event.ids] == expected[0][1]


def test_a_draft_elsewhere_is_refused(folder: Path, fakes: Devices) -> None:
    model = loaded(folder, PLACEMENTS["halves"])
    for placement in (WHOLE, PLACEMENTS["halves"]):
        draft = Draft(model=loaded(folder, placement))

        with pytest.raises(ConfigError, match="the draft's model is not on cpu:1; load all of it"):
            Generator(model, tokens=512, draft=draft)


def test_hidden_states_of_texts_are_those_of_one_device(folder: Path, fakes: Devices) -> None:
    texts = [[5, 6, 7, 8], [9] * 300, []]
    models = (loaded(folder, WHOLE), loaded(folder, PLACEMENTS["three"]))

    expected, found = (
        Generator(model, tokens=1024).states.hidden(*texts, last=3) for model in models
    )

    pairs = zip(found, expected, strict=True)
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)
    assert {device_of(x) for x in found} == {C}


def test_given_embeddings_go_to_the_first_device(folder: Path, fakes: Devices) -> None:
    rows, ids = torch.randn(3, 64), [FIRST_EMBEDDING + index for index in range(3)]
    request = Request([5, 6, *ids, 7], embeddings=[rows], max_new_tokens=4, settings=GREEDY)

    expected, found = (
        [event.ids for event in Generator(loaded(folder, each), tokens=512).stream(request)]
        for each in (WHOLE, PLACEMENTS["halves"])
    )

    assert found == expected


@pytest.mark.slow
@torch.inference_mode()
def test_chains_end_at_a_border(tmp_path: Path) -> None:
    spec, ids = make_packed("llama", tmp_path), torch.randint(0, 250, (2, 3))
    apart = Placement(embedding=A, layers=(A, B), head=B)

    with devices():
        expected, found = (
            packed(spec, where).forward(ids).cpu() for where in (Placement.on(A, 2), apart)
        )

    error = (found - expected).norm() / expected.norm()
    assert error <= 2e-3  # fp16 results of fp32 sums


@pytest.mark.parametrize("family", ["gpt2", "cohere", "gemma2", "smollm3"])
@torch.inference_mode()
def test_families_with_parts_of_their_own_are_split_like_any_other(
    family: str, tmp_path: Path, fakes: Devices
) -> None:
    folder = make_checkpoint(family, tmp_path / family)
    ids = torch.randint(0, 250, (1, 30))
    placements = Placement.on(A, 2), Placement(embedding=A, layers=(A, B), head=B)

    whole, split = (loaded(folder, each).decoder.forward(ids).cpu() for each in placements)

    assert torch.equal(split, whole)


@pytest.mark.slow
def test_adapters_are_where_their_linears_are(folder: Path, tmp_path: Path, fakes: Devices) -> None:
    folders = [make_adapter(tmp_path / str(rank), folder, rank=rank) for rank in (4, 12)]
    texts = []
    for placement in (WHOLE, PLACEMENTS["three"]):
        model = loaded(folder, placement)
        small, wide = (Adapter.load(each, model) for each in folders)
        generator = Generator(model, slots=3, tokens=1024)
        requests = [
            Request(TEXT, adapters=used, max_new_tokens=6, settings=GREEDY, tag=index)
            for index, used in enumerate([(small,), (), (small, wide)])  # the second one grows
        ]
        ids = [[] for _ in requests]
        for request in requests:
            for event in generator.stream(request):
                ids[event.tag] += event.ids
        texts.append(ids)

    assert texts[0] == texts[1]
    assert len({tuple(ids) for ids in texts[0]}) == 3


@torch.inference_mode()
def test_steps_with_adapters_are_recorded_again_on_every_device_when_these_move(
    folder: Path, tmp_path: Path, fakes: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch)
    model = loaded(folder, PLACEMENTS["three"])
    small, wide = (
        Adapter.load(make_adapter(tmp_path / str(rank), folder, rank=rank), model)
        for rank in (4, 12)
    )
    slots = Slots(model, slots=2)
    slots.enter(0, [5, 6, 7], adapters=(small,))
    slots.run(1)
    made = len(Again.made)

    slots.run(1)
    assert len(Again.made) == made
    slots.enter(1, [5, 6, 8], adapters=(wide,))
    slots.enter(0, [5, 6, 7], adapters=(small, wide))
    slots.leave(1)
    slots.run(1)

    assert len(Again.made) == made + 3


def test_a_model_read_from_disk_in_each_pass_is_not_split(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs one device"):
        load_model(folder, device="cpu", placement=PLACEMENTS["halves"], streamed=True)


def test_a_split_among_gpus_needs_a_gpu(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a model is split among GPUs, and the device is `cpu`"):
        load_model(folder, device="cpu", placement=Split())


def test_the_device_with_least_room_per_page_limits_a_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve(folder)
    rooms = {torch.device("cuda", 0): 10**9, torch.device("cuda", 1): 4 * 10**6}
    monkeypatch.setattr("exl2flow.engine.cache.paged.free_memory", rooms.__getitem__)
    first, second = rooms
    split = Placement(embedding=first, layers=(first,) * 3 + (second,) * 2, head=second)
    page = cache_bytes(spec, context=1, cache_format="fp16") // LAYERS

    tokens = fitting(10**6, [(spec, split)], "fp16", 1)

    assert tokens == int(0.7 * 4 * 10**6) // (2 * page) * 256


def test_a_warm_up_writes_to_the_pages_that_slots_have_now(folder: Path, fakes: Devices) -> None:
    generator = Generator(loaded(folder, PLACEMENTS["three"]), slots=2, tokens=512)
    generator.generate([TEXT], max_new_tokens=3, settings=GREEDY)
    steps = generator._device_slots

    generator.warmup()

    for slots in steps.runner._steps._of:
        assert torch.equal(slots.tables.cpu(), steps.tables.cpu())
        assert torch.equal(slots.lengths.cpu(), steps.lengths.cpu())
