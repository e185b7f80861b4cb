"""Steps that are replayed say what steps say that are launched."""

from pathlib import Path

import pytest
import torch
from conversions import small_config
from stage_runs import run_until
from tiny import make_tiny

from exl2flow.core.errors import ContextOverflow
from exl2flow.inference import BaseGenerator, LoadedModel, SamplingSettings, load_model
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.generate.base import Generation
from exl2flow.inference.step import RecordedStep
from exl2flow.kernels import CACHE_FORMATS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["llama", "mistral"])  # the second one with windows
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    windows = {"sliding_window": 40} if request.param == "mistral" else {}
    source = make_tiny(request.param, folder / "source", head_dim=64, **windows)
    config = small_config(source, folder / "out", bpw=4.0)
    run_until(config, "compile")
    return load_model(config.out, device="cuda")


def cache_of(model: LoadedModel, name: str, batch: int) -> PagedCache:
    return PagedCache(
        model.spec, batch=batch, max_tokens=64, form=CACHE_FORMATS[name], device="cuda"
    )


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", ["fp16", "q4"])
@torch.inference_mode()
def test_a_replay_is_a_step(model: LoadedModel, name: str, batch: int) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (batch, 64), device="cuda")
    cache, again = cache_of(model, name, batch), cache_of(model, name, batch)
    for each in (cache, again):
        model.decoder.forward(ids[:, :20], each)
    step = RecordedStep(model.decoder, again)

    for position in range(20, 64):
        token = ids[:, position : position + 1]
        assert torch.equal(step(token), model.decoder.forward(token, cache))

    assert again.length == 64
    with pytest.raises(ContextOverflow):
        step(ids[:, :1])


@torch.inference_mode()
def text_with_launches(model: LoadedModel, *, max_new_tokens: int) -> Generation:
    """Return greedy text, each step launched anew."""
    prompt, made = "The quick", list[int]()
    ids = model.tokenizer.encode(prompt, add_bos=True)
    cache = cache_of(model, "fp16", 1)
    pending = torch.tensor([ids], device="cuda")
    for _ in range(max_new_tokens):
        made.append(int(model.decoder.forward(pending, cache)[0, -1].argmax()))
        pending = torch.tensor([made[-1:]], device="cuda")
    text = model.tokenizer.decode([*ids, *made]).removeprefix(model.tokenizer.decode(ids))
    return Generation(prompt=prompt, text=text, ids=tuple(made), reason="max_new_tokens")


def test_greedy_text_is_the_same(model: LoadedModel) -> None:
    options = {"max_new_tokens": 30, "settings": SamplingSettings.greedy(), "stop_tokens": ()}

    recorded = BaseGenerator(model).generate("The quick", **options)

    assert recorded == text_with_launches(model, max_new_tokens=30)


def test_a_step_that_cannot_be_recorded_is_launched(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "source")  # no kernel attends to heads so small
    options = {"max_new_tokens": 10, "settings": SamplingSettings.greedy(), "stop_tokens": ()}
    model = load_model(folder, device="cuda")
    cache = cache_of(model, "fp16", 1)
    with torch.inference_mode(), pytest.raises(RuntimeError):
        RecordedStep(model.decoder, cache)
    assert cache.length == 0

    text = BaseGenerator(model).generate("The quick", **options)

    assert text == text_with_launches(model, max_new_tokens=10)
