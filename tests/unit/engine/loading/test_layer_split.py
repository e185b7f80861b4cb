"""Which GPU takes which layers: manual and automatic splits, refusals, and forecast sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_needs import needs
from tiny import make_tiny, tiny_config

from exl2flow.core.errors import ConfigError, OutOfDeviceMemory
from exl2flow.engine.loading.layer_split import GB, RESERVE, Sizes, Split, place
from exl2flow.model import CanonicalTensors, ModelSpec, Placement, expected_tensors, resolve
from exl2flow.model.memory.footprint import Footprint, Texts

ZERO, ONE, TWO = (torch.device("cuda", index) for index in range(3))
LAYERS = 6
SIZES = Sizes(embedding=4_000, layers=(10_000,) * LAYERS, head=5_000)
TEXTS = Texts(context=512, pages=2, cache_format="fp16")
PLENTY = 10**12


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("placed")
    config = tiny_config("llama", num_hidden_layers=LAYERS)
    (folder / "config.json").write_text(json.dumps(config))
    return resolve(folder)


def free(*bytes_free: int) -> list:
    return [lambda each=each: each for each in bytes_free]


def test_a_model_that_fits_the_first_device_stays_there(spec: ModelSpec) -> None:
    placement = place(spec, SIZES, {ZERO: PLENTY, ONE: PLENTY}, TEXTS)

    assert placement == Placement.on(ZERO, LAYERS)
    assert not placement.is_split


def test_a_device_is_filled_to_the_last_byte_before_the_next_one(spec: ModelSpec) -> None:
    half = Placement(embedding=ZERO, layers=(ZERO,) * 3 + (ONE,) * 3, head=ONE)
    room = needs(spec, SIZES, half, TEXTS)

    placement = place(spec, SIZES, {ZERO: room[ZERO], ONE: room[ONE]}, TEXTS)

    assert placement == half
    assert [*placement.spans()] == [(ZERO, range(3)), (ONE, range(3, 6))]
    tight = place(spec, SIZES, {ZERO: room[ZERO] - 1, ONE: PLENTY}, TEXTS)
    assert tight.layers == (ZERO,) * 2 + (ONE,) * 4


def test_needs_on_one_device_are_the_footprint_and_the_files(spec: ModelSpec) -> None:
    whole = Footprint.of(spec, context=500, cache_format="q4", sequences=3)
    texts = Texts(context=500, pages=6, cache_format="q4", sequences=3)

    found = needs(spec, SIZES, Placement.on(ZERO, LAYERS), texts)

    assert found == {ZERO: whole.total - whole.device + 69_000}


def test_a_tied_head_takes_memory_where_the_embedding_is_not(spec: ModelSpec) -> None:
    tied = Sizes(embedding=4_000, layers=SIZES.layers, head=4_100, shared=4_000)
    apart = Placement(embedding=ZERO, layers=(ZERO,) * LAYERS, head=ONE)

    here = needs(spec, tied, Placement.on(ZERO, LAYERS), TEXTS)
    own = needs(spec, SIZES, Placement.on(ZERO, LAYERS), TEXTS)
    there = needs(spec, tied, apart, TEXTS)

    assert own[ZERO] - here[ZERO] == 5_000 - 100
    assert there[ONE] - needs(spec, SIZES, apart, TEXTS)[ONE] == 4_100 - 5_000


def test_a_draft_has_room_on_the_device_of_the_head(spec: ModelSpec) -> None:
    drafted = replace(SIZES, draft=(spec, SIZES))
    apart = Placement(embedding=ZERO, layers=(ZERO,) * LAYERS, head=ONE)

    plain, found = (needs(spec, sizes, apart, TEXTS) for sizes in (SIZES, drafted))
    draft = needs(spec, SIZES, Placement.on(ONE, LAYERS), TEXTS)[ONE]

    assert found[ZERO] == plain[ZERO]
    assert draft < found[ONE] <= plain[ONE] + draft


def test_a_dense_model_decodes_no_matrices(spec: ModelSpec) -> None:
    whole = Placement.on(ZERO, LAYERS)

    packed, dense = (
        needs(spec, replace(SIZES, packed=each), whole, TEXTS)[ZERO] for each in (True, False)
    )

    assert dense < packed


def test_too_little_room_names_need_and_room_per_device_and_a_cache_that_fits(
    spec: ModelSpec,
) -> None:
    long = Texts(context=8192, pages=32, cache_format="fp16")
    rooms = needs(spec, SIZES, Placement.on(ZERO, LAYERS), TEXTS)  # two pages

    with pytest.raises(OutOfDeviceMemory) as caught:
        place(spec, SIZES, rooms, long)

    text = str(caught.value)
    assert "8,192 tokens of fp16" in text
    assert "`cuda:0` takes" in text
    assert "to the head need" in text
    tokens = int(text.rpartition("--tokens ")[2].rstrip("`"))
    assert tokens == 512
    assert place(spec, SIZES, rooms, Texts(context=512, pages=2, cache_format="fp16"))


def test_no_cache_that_fits_is_told_with_what_a_device_would_need(spec: ModelSpec) -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"with the smallest cache it takes .* MB on one"):
        place(spec, SIZES, {ZERO: 1_000, ONE: 1_000}, TEXTS)


def test_sizes_come_from_the_files(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "plain", dtype=torch.float32)
    spec = resolve(folder)
    shapes = expected_tensors(spec)
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())

    sizes = Sizes.of(spec, CanonicalTensors(spec), torch.float16)

    assert sizes.embedding + sum(sizes.layers) + sizes.head == 2 * numel
    assert sizes.embedding == 2 * spec.vocab_size * spec.hidden_size
    assert len({*sizes.layers}) == 1
    assert sizes.shared == 0


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tied", tie_word_embeddings=True)
    spec = resolve(folder)

    sizes = Sizes.of(spec, CanonicalTensors(spec), torch.float32)

    assert sizes.shared == sizes.embedding == 4 * spec.vocab_size * spec.hidden_size
    assert sizes.head == sizes.shared + 4 * spec.hidden_size  # and the final norm


@pytest.mark.parametrize(
    ("options", "found", "rooms"),
    [
        ({"gpu_split": "20,0,1.5"}, (PLENTY,) * 3, {ZERO: 20 * GB, TWO: 3 * GB // 2}),
        ({"gpu_split": "20,20"}, (PLENTY, 7), {ZERO: 20 * GB, ONE: 7}),
        ({"gpu_split": "auto"}, (GB,) * 2, {ZERO: GB - RESERVE[0], ONE: GB - RESERVE[0]}),
        ({"gpu_split": "auto", "reserve": "5,7"}, (10,) * 3, {ZERO: 5, ONE: 3, TWO: 3}),
        ({"gpu_split": None, "devices": "2,0"}, (GB, -1, 9), {TWO: 0, ZERO: GB - RESERVE[0]}),
    ],
    ids=["GB, 0 skips", "at most what is free", "auto", "reserve", "devices alone, in order"],
)
def test_rooms_follow_from_options_and_free_memory(
    options: dict[str, str], found: tuple[int, ...], rooms: dict[torch.device, int]
) -> None:
    split = Split.parse(**options)
    assert split is not None

    assert [*split.rooms(free(*found)).items()] == [*rooms.items()]


def test_only_devices_that_are_used_are_looked_at_and_without_options_none() -> None:
    def never() -> int:
        raise AssertionError("a context would be created there")

    assert Split.parse(None) is None
    split = Split(sizes=(20, 0, 1))

    split.rooms([lambda: PLENTY, never, lambda: PLENTY, never])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("20;24",), "not a list such as `20,24` in GB"),
        (("20,-1",), "`--gpu-split 20,-1` is not a list"),
        (("nan",), "`--gpu-split nan` is not a list"),
        (("inf,1",), "`--gpu-split inf,1` is not a list"),
        (("0,0",), "skips every device"),
        (("auto", "1.5"), "`--reserve 1.5` is not a list such as `200000000,0` in bytes"),
        (("20", "5"), "`--reserve` goes with `--gpu-split auto`"),
        (("auto", None, "0,0"), "`--devices 0,0` names a device twice"),
        (("20,24", None, "0"), "`--gpu-split` has 2 sizes, `--devices` 1 devices"),
        (("20", None, "0,1"), "`--gpu-split` has 1 sizes, `--devices` 2 devices"),
        (("auto", None, "a"), "`--devices a` is not a list"),
    ],
)
def test_malformed_or_contradictory_options_are_refused(
    options: tuple[str | None, ...], message: str
) -> None:
    names = dict(zip(("reserve", "devices"), options[1:], strict=False))

    with pytest.raises(ConfigError, match=message.replace("`--", ".--")):
        Split.parse(options[0], **names)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split(devices=(0, 3)), "`--devices` names 3, but the GPUs that torch sees are 0, 1"),
        (Split(sizes=(GB, GB, GB)), "3 sizes are given, but the GPUs that torch sees are 0, 1"),
        (Split(reserve=(1, 1, 1)), "3 sizes are given"),
    ],
)
def test_devices_that_are_not_there_are_refused(split: Split, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split.rooms(free(GB, GB))
    with pytest.raises(ConfigError, match="the GPUs that torch sees are none"):
        Split().rooms([])
