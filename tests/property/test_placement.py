"""Dealing layers out to devices: all, in order, within their rooms, as early as possible."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from device_needs import needs
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import tiny_config

from exl2flow.core.errors import OutOfDeviceMemory
from exl2flow.engine.loading.layer_split import Sizes, place
from exl2flow.model import ModelSpec, Placement, resolve
from exl2flow.model.memory.footprint import Texts

MOST_LAYERS, MOST_DEVICES = 7, 4
BYTES = st.integers(0, 3_000_000)
TEXTS = st.builds(
    Texts,
    context=st.integers(1, 1000),
    pages=st.integers(1, 8),
    cache_format=st.sampled_from(["fp16", "fp8", "q4"]),
    sequences=st.integers(1, 3),
)


@cache
def spec_of(layers: int) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config("llama", num_hidden_layers=layers)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return resolve(Path(folder))


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, Sizes]:
    layers = draw(st.lists(BYTES, min_size=1, max_size=MOST_LAYERS))
    embedding, head = draw(BYTES), draw(BYTES)
    shared = embedding if draw(st.booleans()) else 0
    sizes = Sizes(embedding=embedding, layers=tuple(layers), head=head + shared, shared=shared)
    return spec_of(len(layers)), sizes


ROOMS = st.lists(st.integers(0, 12_000_000), min_size=1, max_size=MOST_DEVICES)


def rooms_of(values: list[int]) -> dict[torch.device, int]:
    return {torch.device("cuda", index): value for index, value in enumerate(values)}


def order(placement: Placement) -> list[int]:
    parts = (placement.embedding, *placement.layers, placement.head)
    return [int(device.index) for device in parts]


def placed(model: tuple[ModelSpec, Sizes], rooms: list[int], texts: Texts) -> Placement | None:
    try:
        return place(*model, rooms_of(rooms), texts)
    except OutOfDeviceMemory:
        return None


@given(models(), ROOMS, TEXTS)
def test_every_part_has_one_place_in_order_and_no_device_more_than_its_room(
    model: tuple[ModelSpec, Sizes], rooms: list[int], texts: Texts
) -> None:
    placement = placed(model, rooms, texts)

    if placement is None:
        return
    assert len(placement.layers) == model[0].num_layers
    assert order(placement) == sorted(order(placement))
    assert [i for _, span in placement.spans() for i in span] == [*range(model[0].num_layers)]
    taken = needs(*model, placement, texts)
    assert all(taken[device] <= rooms[int(device.index)] for device in taken)
    assert [*taken] == [*placement.devices]


@given(models(), ROOMS, TEXTS, st.integers(0, MOST_DEVICES - 1), st.integers(0, 4_000_000))
def test_more_room_never_moves_a_part_later(
    model: tuple[ModelSpec, Sizes], rooms: list[int], texts: Texts, where: int, more: int
) -> None:
    while (before := placed(model, rooms, texts)) is None:
        rooms = [2 * room + 1 for room in rooms]
    rooms[where % len(rooms)] += more

    after = placed(model, rooms, texts)

    assert after is not None
    assert all(late <= early for late, early in zip(order(after), order(before), strict=True))


@given(models(), ROOMS, TEXTS, st.data())
def test_what_is_refused_fits_in_no_way_at_all(
    model: tuple[ModelSpec, Sizes], rooms: list[int], texts: Texts, data: st.DataObject
) -> None:
    assume(placed(model, rooms, texts) is None)
    parts = model[0].num_layers + 2
    cuts = st.integers(0, len(rooms) - 1)
    other = sorted(data.draw(st.lists(cuts, min_size=parts, max_size=parts)))
    devices = [torch.device("cuda", index) for index in other]
    guess = Placement(embedding=devices[0], layers=tuple(devices[1:-1]), head=devices[-1])

    taken = needs(*model, guess, texts)

    assert any(taken[device] > rooms[int(device.index)] for device in taken)


@given(models(), ROOMS, TEXTS)
def test_without_the_last_device_that_is_used_there_is_no_room(
    model: tuple[ModelSpec, Sizes], rooms: list[int], texts: Texts
) -> None:
    while (placement := placed(model, rooms, texts)) is None:
        rooms = [2 * room + 1 for room in rooms]

    assert placed(model, rooms[: order(placement)[-1]], texts) is None


@given(models(), ROOMS, TEXTS)
def test_a_device_without_room_is_skipped(
    model: tuple[ModelSpec, Sizes], rooms: list[int], texts: Texts
) -> None:
    with_gap = placed(model, [rooms[0], 0, *rooms[1:]], texts)
    without = placed(model, rooms, texts)

    shifted = None if without is None else [index + (index > 0) for index in order(without)]
    assert (None if with_gap is None else order(with_gap)) == shifted


@given(models(), ROOMS, TEXTS)
def test_the_cache_that_a_refusal_names_is_the_largest_that_fits(
    model: tuple[ModelSpec, Sizes], rooms: list[int], texts: Texts
) -> None:
    try:
        place(*model, rooms_of(rooms), texts)
    except OutOfDeviceMemory as error:
        _, found, named = str(error).rpartition("--tokens ")
    else:
        return

    def fits(pages: int) -> bool:
        context = min(texts.context, 256 * pages)
        fewer = Texts(
            context=context, pages=pages, cache_format=texts.cache_format, sequences=texts.sequences
        )
        return placed(model, rooms, fewer) is not None

    most = max((pages for pages in range(1, texts.pages + 1) if fits(pages)), default=0)
    assert (int(named.rstrip("`")) if found else 0) == 256 * most
