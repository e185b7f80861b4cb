"""What a model on two GPUs is used for: bit for bit as on one GPU with a border at the same layer.

Models that are not quantized round states behind each part, so theirs need no border.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from conversions import small_config
from cut import cut, halves
from device_needs import needs
from packed_models import make_packed
from tiny import VOCAB_SIZE, make_tiny

from exl2flow.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl2flow.compat.exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
from exl2flow.core.options.base import SplitModels
from exl2flow.core.options.serving import ServeOptions
from exl2flow.core.options.validation import ValidateOptions
from exl2flow.core.runtime.memory import free_memory
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import read_tensors
from exl2flow.core.store.stage import COMPOSED, ROWS_FILE, Pipeline
from exl2flow.engine.loading.layer_split import Sizes
from exl2flow.inference import (
    Adapter,
    Draft,
    Generator,
    LoadedModel,
    NgramDraft,
    PromptCache,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.inference.compose.stage import COMPOSE
from exl2flow.inference.validate.stage import generate_sample
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model import CanonicalTensors, Placement, resolve
from exl2flow.model.memory.footprint import Texts

pytestmark = pytest.mark.multigpu

A, B = torch.device("cuda", 0), torch.device("cuda", 1)
GREEDY, HOT = SamplingSettings.greedy(), SamplingSettings(temperature=1.2, top_k=0, top_p=1.0)
TEXT = "The quick brown fox jumps over the lazy dog. Numbers such as 3.14 and 42"
MOST = 2048  # positions
FAMILIES = ("llama", "mixtral", "qwen3.5-text")  # dense, with experts, with a state
DENSE, EXPERTS, STATE = FAMILIES
USES: list[tuple[str, dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {"cache": "q4"}),
    (DENSE, {"draft": NgramDraft(tokens=3)}),
    (DENSE, {"draft": "model"}),
    (EXPERTS, {}),
    (EXPERTS, {"cache": "q8"}),
    (EXPERTS, {"draft": "model"}),
    (STATE, {}),
    (STATE, {"cache": "q4", "draft": NgramDraft(tokens=3)}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("uses")
    wide: dict[str, object] = {"head_dim": 64}
    for family, shape in ((DENSE, wide), (EXPERTS, wide), (STATE, {})):
        make_packed(family, made / family, **shape)
    return {family: made / family for family in FAMILIES}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models that are not quantized."""
    made = tmp_path_factory.mktemp("plain")
    for seed, name in enumerate(("a", "b")):
        make_tiny("llama", made / name, seed=seed, head_dim=64, num_hidden_layers=4)
    return made


def both(folder: Path) -> tuple[LoadedModel, LoadedModel]:
    """Return a model on one GPU with a border, and on two."""
    layers = resolve(folder).num_layers
    placements = cut(A, layers), halves(A, B, layers)
    one, two = (load_model(folder, placement=each, max_tokens=MOST) for each in placements)
    return one, two


def ids_of(generator: Generator, requests: Sequence[Request]) -> list[list[int]]:
    """Return the ids of requests that run at once."""
    found: list[list[int]] = [[] for _ in requests]
    for ids, request in zip(found, requests, strict=True):
        generator.submit(request, deliver=lambda event, ids=ids: ids.extend(event.ids))
    while not generator.is_idle:
        generator.step()
    return found


def first_half(folder: Path, *, tokens: int, slots: int) -> int:
    """Return bytes with which the first GPU takes half of a model, less than all of it."""
    spec = resolve(folder)
    texts = Texts(
        context=min(tokens, spec.max_positions),
        pages=-(-tokens // PAGE_TOKENS),
        cache_format="fp16",
        sequences=slots,
    )
    sizes = Sizes.of(spec, CanonicalTensors(spec), torch.float16)
    placement = halves(A, B, spec.num_layers)
    return needs(spec, sizes, placement, texts)[A] + 16


@pytest.mark.parametrize(("family", "options"), USES, ids=str)
def test_texts_are_those_of_one_gpu(
    folders: dict[str, Path], family: str, options: dict[str, Any]
) -> None:
    requests = [
        Request(TEXT * 9, max_new_tokens=24, settings=GREEDY, stops=()),
        Request(TEXT * 9 + " more", max_new_tokens=24, settings=HOT, seed=2, stops=()),
        Request(TEXT, max_new_tokens=24, settings=HOT, seed=3, stops=()),
    ]
    found = []
    for model in both(folders[family]):
        more = dict(options)
        if options.get("draft") == "model":
            where = str(model.decoder.placement.head)
            guesses = load_model(folders[DENSE], device=where, max_tokens=MOST)
            more["draft"] = Draft(model=guesses, tokens=3)
        found.append(ids_of(Generator(model, slots=3, tokens=4096, chunk=256, **more), requests))

    assert found[0] == found[1]
    assert [len(ids) for ids in found[0]] == [24] * 3


def test_each_request_has_its_own_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    paths = [make_adapter(tmp_path / str(rank), folders[DENSE], rank=rank) for rank in (4, 8)]
    found = []
    for model in both(folders[DENSE]):
        small, wide = (Adapter.load(path, model) for path in paths)
        requests = [
            Request(TEXT, max_new_tokens=16, settings=GREEDY, adapters=used, stops=())
            for used in ((), (small,), (small, wide))
        ]
        found.append(ids_of(Generator(model, slots=3, tokens=1024), requests))

    assert found[0] == found[1]
    assert len({tuple(ids) for ids in found[1]}) == 3


@pytest.mark.parametrize("where", ["host", "disk"])
def test_beginnings_of_prompts_come_back_from_host_memory_and_from_disk(
    folders: dict[str, Path], where: str, tmp_path: Path
) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(1100)] for _ in range(2)]
    requests = [Request(p, max_new_tokens=12, settings=GREEDY, stops=()) for p in prompts]
    found, cached = [], []
    for index, model in enumerate(both(folders[DENSE])):
        ram, disk = (10**8, None) if where == "host" else (0, tmp_path / str(index))
        keep = PromptCache(ram=ram, disk=disk)
        ids = []
        for turn in range(2):  # each prompt drives the other one out of the cache
            if turn == 0 or where == "disk":  # a later run finds the files
                generator = Generator(model, slots=1, tokens=1536, keep=keep)
            for request in requests:
                events = [*generator.stream(request)]
                ids.append([token for event in events for token in event.ids])
                assert events[-1].statistics is not None
                cached.append(events[-1].statistics.cached_tokens)
            if turn or where == "disk":
                generator.close()
        found.append(ids)

    assert found[0] == found[1]
    assert found[1][:2] == found[1][2:]
    assert cached[:4] == cached[4:]
    assert min(cached[6:]) >= 4 * PAGE_TOKENS


def test_a_server_replaces_a_split_model_by_another_one(plain: Path) -> None:
    pytest.importorskip("starlette")
    from exl2flow.cli.commands.serve import _host
    from exl2flow.serve.answers.answer import AnswerPlan
    from exl2flow.serve.hosts.models import Models

    size = first_half(plain / "a", tokens=1024, slots=2)
    names, plan = (
        ("a", "b", "a"),
        AnswerPlan(
            requests=(Request([5, 6, 7], max_new_tokens=16, settings=GREEDY, stops=(), tag=0),),
            prompts=((5, 6, 7),),
        ),
    )

    def texts(**where: str) -> tuple[list[list[int]], set[tuple[torch.device, ...]]]:
        options = ServeOptions(
            models=plain, swap=True, slots=2, tokens=1024, tool_grammar="off", **where
        )
        placed = set()

        def make(folder: Path) -> Any:
            host = _host(folder, None, options, PromptCache())
            placed.add(host.model.decoder.placement.devices)
            return host

        async def run() -> list[list[int]]:
            models = Models(make(plain / "a"), make)
            found = [await answer_of(models, name, plan) for name in names]
            await models.unload()
            await models.load("b")
            found.append(await answer_of(models, "b", plan))
            await models.close()
            return found

        return asyncio.run(run()), placed

    split, devices = texts(gpu_split=f"{size / 1e9:.9f},1")
    whole, _ = texts(device="cuda:0")

    assert devices == {(A, B)}
    assert split == whole
    assert split[0] == split[2] != split[1] == split[3]


async def answer_of(models: Any, name: str, plan: Any) -> list[int]:
    """Return the ids that the model of a name writes, which may have to be loaded first."""
    async with models.using(name) as host:
        assert host.name == name
        answer = await host.begin(lambda: plan)
        try:
            updates = [one async for some in answer.updates() for one in some]
            return [token for one in updates for token in one.event.ids]
        finally:
            host.end(answer)


def test_rows_of_calibration_are_those_of_one_gpu(plain: Path, tmp_path: Path) -> None:
    source = plain / "a"
    calibration = {"text": "self", "rows": 4, "measure_rows": 2}
    calibration |= {"row_tokens": 64, "measure_row_tokens": 64}
    size = first_half(source, tokens=2 * PAGE_TOKENS, slots=2)  # of two rows at once
    found = []
    for name, where in (("one", {}), ("two", {"gpu_split": f"{size / 1e9:.9f},1"})):
        out = tmp_path / name
        config = small_config(
            source, out, work_root=tmp_path / f"{name}.work", calibration=calibration, **where
        )
        pipeline = Pipeline(config, (COMPOSE,), device="cuda")
        torch.cuda.reset_peak_memory_stats(B)
        before = torch.cuda.memory_allocated(B)
        pipeline.run("compose", progress=silent)
        used = torch.cuda.max_memory_allocated(B) - before
        found.append(read_tensors(pipeline.path("compose") / ROWS_FILE)[COMPOSED])
        assert (used > 0) == (name == "two")

    assert found[0].shape == (2, 64)
    assert torch.equal(*found)


def test_a_sample_is_that_of_one_gpu(plain: Path) -> None:
    options = ValidateOptions(sample_tokens=12)
    where = first_half(plain / "a", tokens=512 + 12, slots=1)  # a prompt, and the sample
    split = SplitModels(gpu_split=f"{where / 1e9:.9f},1")

    torch.cuda.reset_peak_memory_stats(B)
    before = torch.cuda.memory_allocated(B)
    found = generate_sample(plain / "a", options, "cuda", split)

    assert torch.cuda.max_memory_allocated(B) > before
    assert found == generate_sample(plain / "a", options, "cuda:0")


@pytest.mark.parametrize("way", ["autosplit", "sizes"])
def test_a_program_of_exllamav2_has_the_texts_of_one_gpu(plain: Path, way: str) -> None:
    config = ExLlamaV2Config(str(plain / "a"))
    config.max_seq_len = 1024
    size = first_half(plain / "a", tokens=1024, slots=1)
    found, told = [], list[tuple[int, int]]()
    loads: list[Callable[[ExLlamaV2, Any], None]] = [
        lambda model, _: model.load([8, 0]),
        lambda model, cache: (
            model.load_autosplit(
                cache,
                reserve_vram=[free_memory(A) - size, 0],
                callback=lambda *part: told.append(part),
            )
            if way == "autosplit"
            else model.load([size / 2**30, 1], callback=lambda *part: told.append(part))
        ),
    ]
    for load in loads:
        model = ExLlamaV2(config)
        cache = ExLlamaV2Cache_Q6(model, max_seq_len=1024, lazy=True)
        load(model, cache)
        generator = ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(config))
        generator.warmup()
        settings = ExLlamaV2Sampler.Settings.greedy()
        found.append(
            generator.generate(
                ["The quick brown", "A"], 20, gen_settings=settings, completion_only=True
            )
        )
        placement = model.native.decoder.placement

    assert isinstance(placement, Placement)
    assert placement.devices == (A, B)
    assert told[-1][0] == told[-1][1] == len(told)
    assert found[0] == found[1]
