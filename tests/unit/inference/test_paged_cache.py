"""A paged cache in a whole model: what it changes, and what it does not."""

from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from exl2flow.core.errors import ConfigError, ContextOverflow
from exl2flow.inference import BaseGenerator, LoadedModel, SamplingSettings, load_model
from exl2flow.inference.cache.contiguous import ContiguousCache
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.kernels import CACHE_FORMATS, PAGE_TOKENS, LayerStore, slots_of
from exl2flow.kernels.torch_cache import read_cache
from exl2flow.kernels.torch_ops import TorchOps
from exl2flow.model import step_table

TOKENS = PAGE_TOKENS + 20
# KL divergence in nats from full passes: rounding of keys and values alone
MOST_KL = {"fp16": 1e-6, "fp8": 0.05, "q8": 2e-4, "q6": 0.02, "q4": 0.05}


@pytest.fixture(scope="module", params=["llama", "mistral"])  # mistral has windows
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    windows = {"sliding_window": 40} if request.param == "mistral" else {}
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(request.param, folder, max_position_embeddings=512, **windows)
    return load_model(folder, device="cpu")


def cache_of(model: LoadedModel, name: str, *, batch: int = 1, tokens: int = TOKENS) -> PagedCache:
    form = CACHE_FORMATS[name]
    return PagedCache(model.spec, batch=batch, max_tokens=tokens, form=form, device="cpu")


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.parametrize("name", CACHE_FORMATS)
@torch.inference_mode()
def test_passes_with_a_cache_predict_what_full_passes_do(model: LoadedModel, name: str) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (2, TOKENS))
    expected = log_probabilities(model.decoder.forward(ids))
    cache = cache_of(model, name, batch=2)

    pieces = [ids[:, :100], ids[:, 100:250], *ids[:, 250:].split(1, dim=1)]
    logits = torch.cat([model.decoder.forward(piece, cache) for piece in pieces], dim=1)

    assert cache.length == TOKENS
    found = log_probabilities(logits)
    torch.testing.assert_close(found[:, :100], expected[:, :100], rtol=1e-4, atol=1e-4)
    kl = (expected.exp() * (expected - found)).sum(-1)[:, 100:].mean()
    assert float(kl) < MOST_KL[name]


@torch.inference_mode()
def test_a_step_with_lengths_on_the_device_is_a_forward_pass(model: LoadedModel) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (2, 34))
    cache, again = (cache_of(model, "q8", batch=2, tokens=64) for _ in range(2))
    table = step_table(model.spec.rope, 64, torch.device("cpu"))
    for each in (cache, again):
        model.decoder.forward(ids[:, :30], each)

    for position in range(30, 34):
        again.places.stand_at(position)
        token = ids[:, position : position + 1]
        found = model.decoder.forward(token, again, table.at(again.places.lengths))
        assert torch.equal(found, model.decoder.forward(token, cache))


@torch.inference_mode()
def test_what_is_forgotten_is_written_again(model: LoadedModel) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (1, 60))
    cache, again = cache_of(model, "q4"), cache_of(model, "q4")
    model.decoder.forward(ids[:, :40], cache)
    model.decoder.forward(torch.randint(0, model.spec.vocab_size, (1, 20)), cache)
    cache.truncate(40)
    assert cache.length == 40

    model.decoder.forward(ids[:, :40], again)
    found, expected = (model.decoder.forward(ids[:, 40:], c) for c in (cache, again))

    assert torch.equal(found, expected)


@torch.inference_mode()
def test_a_prompt_reads_no_empty_cache(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []

    def seen(store: LayerStore, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        read.append(slots.tolist())
        return read_cache(store, slots)

    monkeypatch.setattr(TorchOps, "read_cache", staticmethod(seen))
    ids, cache = torch.randint(0, model.spec.vocab_size, (2, 9)), cache_of(model, "q8", batch=2)

    model.decoder.forward(ids, cache)
    assert read == []
    model.decoder.forward(ids[:, :3], cache)

    second = 2 * PAGE_TOKENS  # the first slot of the second sequence
    held = [*range(12), *range(second, second + 12)]  # with room for the new ones
    assert read == [held] * model.spec.num_layers


def test_slots_are_found_once_for_all_layers(model: LoadedModel) -> None:
    places = cache_of(model, "q8", batch=2).places

    held, new = places.slots_between(0, 300), places.slots_between(300, 310)

    assert places.slots_between(0, 300) is held
    assert places.slots_between(300, 310) is new
    for table, *rows in zip(places.tables, held, new, strict=True):
        assert torch.equal(torch.cat(rows), slots_of(table, 0, 310))
    places.slots_between(310, 311)
    assert len(places._between) == 1


def test_a_full_cache_says_so(model: LoadedModel) -> None:
    cache = cache_of(model, "q8", tokens=8)
    with pytest.raises(ContextOverflow, match="9 tokens do not fit a cache of 8"):
        model.decoder.forward(torch.zeros(1, 9, dtype=torch.int64), cache)


def test_a_smaller_format_takes_less_memory(model: LoadedModel) -> None:
    sizes = [cache_of(model, name).nbytes for name in ("fp16", "q8", "fp8", "q6", "q4")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


def test_text_of_an_fp16_cache_is_that_of_full_precision(model: LoadedModel) -> None:
    options = {"max_new_tokens": 20, "settings": SamplingSettings.greedy(), "stop_tokens": ()}
    plain = BaseGenerator(model).generate("The quick", **options)
    assert BaseGenerator(model, cache="fp16").generate("The quick", **options) == plain


def test_an_unknown_format_is_named(model: LoadedModel) -> None:
    with pytest.raises(
        ConfigError, match="no cache format `q5`; choose one of fp16, fp8, q8, q6, q4"
    ):
        BaseGenerator(model, cache="q5")


@torch.inference_mode()
def test_both_kinds_of_cache_agree_but_for_rounding(tmp_path: Path) -> None:
    model = load_model(make_tiny("qwen3", tmp_path / "tiny"), device="cpu")
    spec, ids = model.spec, torch.randint(0, model.spec.vocab_size, (1, 30))
    plain = ContiguousCache(spec, batch=1, max_tokens=64, dtype=torch.float16, device="cpu")

    found, expected = (
        torch.cat([model.decoder.forward(part, c) for part in ids.split(15, dim=1)], dim=1)
        for c in (cache_of(model, "fp16", tokens=64), plain)
    )

    # a contiguous cache rounds a call's own keys and values, too
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
