"""Layers on two GPUs: texts and logits of one, forecast memory, models larger than one GPU."""

import gc
from pathlib import Path

import pytest
import torch
from conversions import small_config
from cut import cut
from device_needs import needs
from stage_runs import run_until
from tiny import make_tiny

from exl2flow.core.errors import OutOfDeviceMemory
from exl2flow.core.runtime.memory import free_memory, limit_memory
from exl2flow.engine.loading.layer_split import Sizes, Split, place
from exl2flow.inference import Draft, Generator, LoadedModel, Request, SamplingSettings, load_model
from exl2flow.kernels.cuda.graphs import CudaGraph
from exl2flow.model import CanonicalTensors, Placement, resolve
from exl2flow.model.memory.footprint import Texts

pytestmark = pytest.mark.multigpu

A, B = torch.device("cuda", 0), torch.device("cuda", 1)
LAYERS = 4
LONG = 1024  # positions, more than the model was made for
HALVES = Placement(embedding=A, layers=(A, A, B, B), head=B)
GREEDY = SamplingSettings.greedy()
TEXT = "The quick brown fox jumps over the lazy dog. Numbers such as 3.14 and 42"
NEAR = 2e-3  # relative error of logits: chains end at the border, where states are fp16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("split")
    source = make_tiny("llama", made / "source", head_dim=64, num_hidden_layers=LAYERS)
    config = small_config(source, made / "out", bpw=4.0)
    run_until(config, "compile")
    return config.out


def generated(model: LoadedModel, **options: object) -> list[torch.Tensor]:
    """Return the logits of 100 steps of a text that reads its own tokens."""
    generator = Generator(model, slots=2, tokens=1024, **options)
    request = Request(TEXT, max_new_tokens=100, settings=GREEDY, logits=True, stops=())
    return [x for event in generator.stream(request) for x in event.logits if x is not None]


def long_text(model: LoadedModel) -> list[str]:
    """Return what a model writes behind 8,000 tokens."""
    prompt = [5 + index % 200 for index in range(8000)]
    generator = Generator(model, tokens=8192, slots=1)
    return generator.generate([prompt], max_new_tokens=8, settings=GREEDY)


def test_logits_are_near_those_of_one_gpu_and_the_same_in_every_run(
    folder: Path, graphs: list[CudaGraph]
) -> None:
    whole = generated(load_model(folder, device="cuda:0"))
    first, second = (generated(load_model(folder, placement=HALVES)) for _ in range(2))

    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    for found, expected in zip(first, whole, strict=True):
        assert (found - expected).norm() <= NEAR * expected.norm()
    assert graphs


def test_a_model_may_be_on_another_gpu_than_the_current_one(folder: Path) -> None:
    first, second = (generated(load_model(folder, device=f"cuda:{i}")) for i in range(2))

    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_texts_share_pages_and_drafts_change_nothing(folder: Path) -> None:
    draft = Draft(model=load_model(folder, device="cuda:1", max_tokens=LONG), tokens=3)
    models = [load_model(folder, placement=HALVES, max_tokens=LONG) for _ in range(2)]
    prompts = [TEXT * 6, TEXT * 6 + " more", "A", TEXT]
    options = {"max_new_tokens": 24, "settings": GREEDY}

    expected = Generator(models[0], tokens=4096).generate(prompts, **options)
    drafted = Generator(models[1], tokens=4096, draft=draft)

    assert drafted.generate(prompts, **options) == expected


def test_parts_and_pages_are_on_their_devices(folder: Path) -> None:
    model = load_model(folder, placement=HALVES)
    stored = Generator(model, tokens=1024).states.stored

    assert model.decoder.embedding.weight.device == A
    assert [x.device for x in stored[:: len(stored) // LAYERS]] == [*HALVES.layers]


def test_a_model_larger_than_one_gpu_keeps_to_its_sizes_and_the_forecast(tmp_path: Path) -> None:
    source = make_tiny(
        "llama",
        tmp_path / "wide",
        dtype=torch.float16,
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=LAYERS,
        max_position_embeddings=8192,
    )
    spec = resolve(source)
    texts = Texts(context=8192, pages=32, cache_format="fp16", sequences=1)
    sizes = Sizes.of(spec, CanonicalTensors(spec), torch.float16)
    forecast = needs(spec, sizes, HALVES, texts)
    rooms = tuple(int(1.03 * forecast[device]) for device in (A, B))
    split = Split(sizes=rooms, tokens=8192, slots=1)
    with pytest.raises(OutOfDeviceMemory, match=r"`cuda:0` takes .* more; with the smallest cache"):
        load_model(source, placement=Split(sizes=rooms[:1], tokens=8192, slots=1))
    for _ in range(2):  # cuBLAS's workspaces, which the reserve counts, are there from then on
        before = {device: torch.cuda.memory_allocated(device) for device in (A, B)}
        for device in (A, B):
            torch.cuda.reset_peak_memory_stats(device)
        model = load_model(source, placement=split)
        assert model.decoder.placement == HALVES
        text = long_text(model)
        del model
        gc.collect()

    for device, room in zip((A, B), rooms, strict=True):
        taken = torch.cuda.max_memory_allocated(device) - before[device]
        assert abs(taken / forecast[device] - 1) <= 0.03
        assert taken <= room
    assert text == long_text(load_model(source, placement=cut(A, LAYERS)))


def test_a_model_larger_than_one_gpu_runs_on_two(folder: Path) -> None:
    spec = resolve(folder)
    sizes = Sizes.of(spec, CanonicalTensors(spec), torch.float16)
    texts = Texts(context=256, pages=1, cache_format="fp16", sequences=2)
    whole = needs(spec, sizes, Placement.on(A, LAYERS), texts)[A]
    rooms = {A: whole - 1, B: whole}

    with pytest.raises(OutOfDeviceMemory):
        place(spec, sizes, {A: whole - 1}, texts)
    model = load_model(folder, placement=Split(sizes=(whole - 1, whole), tokens=256, slots=2))

    assert model.decoder.placement == place(spec, sizes, rooms, texts)
    assert model.decoder.placement.devices == (A, B)
    assert Generator(model, tokens=256, slots=2).generate("A", max_new_tokens=4) is not None


def test_auto_uses_what_is_free_less_the_reserve(folder: Path) -> None:
    try:
        for device in (A, B):
            limit_memory(device, 4 << 30)
        split = Split(reserve=(free_memory(A) - 1, 0), tokens=256)

        model = load_model(folder, placement=split)
    finally:
        for device in (A, B):
            limit_memory(device, None)

    assert model.decoder.placement.devices == (B,)
