"""All that runs on the first GPU runs on the second one, while the first is current: same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from checkpoints import make_checkpoint
from conversions import small_config
from stage_runs import run_until
from tiny import FAMILY_CONFIGS, make_tiny

from exl2flow.inference import (
    Adapter,
    Draft,
    Generator,
    LoadedModel,
    NgramDraft,
    Request,
    SamplingSettings,
    load_model,
)
from exl2flow.inference.bench import bench
from exl2flow.inference.scoring.evaluate import evaluate

pytestmark = pytest.mark.multigpu

GREEDY, HOT = SamplingSettings.greedy(), SamplingSettings(temperature=1.2, top_k=0, top_p=1.0)
TEXT = "The quick brown fox jumps over the lazy dog. Numbers such as 3.14 and 42"
FAMILIES = ("llama", "qwen3.5-text", "qwen2-moe")  # dense, with a state, with experts
DEVICES = ("cuda:0", "cuda:1")
MOST = 2048  # positions


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, family = tmp_path_factory.mktemp("second"), request.param
    make: Callable[..., Path] = make_tiny if family in FAMILY_CONFIGS else make_checkpoint
    return converted(make(family, made / "source"), made / "out", "cuda:0")


def converted(source: Path, out: Path, device: str) -> Path:
    config = small_config(source, out, bpw=4.0, device=device, work_root=out.with_name("work"))
    run_until(config, "compile")
    return out


def loaded(folder: Path, device: str) -> LoadedModel:
    return load_model(folder, device=device, max_tokens=MOST)


def texts(model: LoadedModel, *, turns: bool = False, **options: Any) -> list[list[int]]:
    """Return ids of texts that begin alike; `turns`: the current device changes between steps."""
    generator = Generator(model, slots=3, tokens=4096, chunk=256, **options)
    requests = [
        Request(TEXT * 9, max_new_tokens=40, settings=GREEDY, stops=()),
        Request(TEXT * 9 + " more", max_new_tokens=40, settings=HOT, seed=2, stops=()),
        Request(TEXT, max_new_tokens=40, settings=HOT, seed=3, stops=()),
    ]
    ids: list[list[int]] = [[] for _ in requests]
    for found, request in zip(ids, requests, strict=True):
        generator.submit(request, deliver=lambda event, found=found: found.extend(event.ids))
    step = 0
    while not generator.is_idle:
        step += 1
        with torch.cuda.device(step % 2 if turns else 0):
            generator.step()
    return ids


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("options", [{}, {"cache": "q4"}, {"draft": NgramDraft(tokens=3)}], ids=str)
def test_texts_are_those_of_the_first_gpu(
    folder: Path, options: dict[str, Any], turns: bool
) -> None:
    first, second = (texts(loaded(folder, device), turns=turns, **options) for device in DEVICES)

    assert second == first
    assert [len(ids) for ids in first] == [40] * 3


def test_a_draft_model_may_be_there_too(folder: Path) -> None:
    models = [loaded(folder, device) for device in DEVICES]
    if models[0].spec.deltas:
        pytest.skip("a model with a state drafts nothing")

    first, second = (texts(m, draft=Draft(model=m, tokens=3)) for m in models)

    assert second == first


def test_adapters_change_texts_alike(folder: Path, tmp_path: Path) -> None:
    found = []
    for device in DEVICES:
        model = loaded(folder, device)
        used = Adapter.load(make_adapter(tmp_path / device[-1], folder, rank=8, seed=1), model)
        request = Request(TEXT, max_new_tokens=20, settings=GREEDY, adapters=(used,), stops=())
        events = Generator(model, slots=2, tokens=1024).stream(request)
        found.append([token for event in events for token in event.ids])

    assert found[0] == found[1]


def test_scores_are_the_same(folder: Path) -> None:
    ids = torch.randint(5, 250, (3, 100))

    first, second = (evaluate([folder], ids, device=device)[0] for device in DEVICES)

    assert second.perplexity == first.perplexity


def test_speed_is_measured_there(folder: Path) -> None:
    found = bench(folder, device="cuda:1", context=40, rows=(1, 3))

    assert {timing.work for timing in found.timings} == {"prompt", "decode"}
    assert found.memory is not None
    assert found.memory.weights > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_conversions_have_the_same_bytes(family: str, tmp_path: Path) -> None:
    make: Callable[..., Path] = make_tiny if family in FAMILY_CONFIGS else make_checkpoint
    source = make(family, tmp_path / "source")

    first, second = (
        converted(source, tmp_path / device[-1] / "out", device) / "model.safetensors"
        for device in DEVICES
    )

    assert second.read_bytes() == first.read_bytes()
