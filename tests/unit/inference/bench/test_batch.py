"""Sequences of a benchmark stand where they stood after each step."""

from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.inference import LoadedModel, load_model
from exl2flow.inference.bench import DecodeBatch
from exl2flow.kernels import PAGE_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(
        make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny"), device="cpu", max_tokens=600
    )


@torch.inference_mode()
def test_rows_stand_where_they_stood_after_a_step(model: LoadedModel) -> None:
    batch = DecodeBatch(model, size=2, context=20, cache="fp32")
    batch.read()
    batch.enter(SamplingSettings.greedy())

    for _ in range(3):
        batch.step()

    assert batch.device_slots.lengths.tolist() == [20, 20]
    assert batch.device_slots.sampler.active.tolist() == [1, 1]


@torch.inference_mode()
def test_a_step_has_the_logits_of_the_sequence(model: LoadedModel) -> None:
    batch = DecodeBatch(model, size=2, context=300, cache="fp32")
    batch.read()
    batch.enter(SamplingSettings.greedy())

    batch.step()

    expected = model.decoder.forward(torch.tensor(batch._ids))[:, -1]
    torch.testing.assert_close(batch.device_slots.logits[:, : expected.shape[1]], expected)


@torch.inference_mode()
def test_filling_gives_every_row_the_first_ones_keys_and_values(model: LoadedModel) -> None:
    batch = DecodeBatch(model, size=3, context=300, cache="fp32")

    batch.fill()

    for store in batch.cache.stores:
        keys = store.keys.data[: 6 * PAGE_TOKENS].view(3, 2 * PAGE_TOKENS, -1)[:, :300]
        first, second, third = keys
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize(("cache", "width"), [("fp32", 4), ("fp16", 2)])
def test_a_step_reads_all_keys_and_values_of_its_rows(
    model: LoadedModel, cache: str, width: int
) -> None:
    batch = DecodeBatch(model, size=3, context=300, cache=cache)

    layers, per_position = 2, 2 * 64  # keys and values of 2 heads of 16, padded
    assert batch.read_bytes == 3 * 301 * layers * per_position * width


def test_a_window_limits_what_a_step_reads(tmp_path: Path) -> None:
    model = load_model(make_tiny("mistral", tmp_path / "model", sliding_window=10), device="cpu")

    long, short = (DecodeBatch(model, size=1, context=n, cache="fp32") for n in (40, 7))

    assert long.read_bytes / 10 == short.read_bytes / 8


def test_an_unknown_cache_is_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="no cache format `q5`"):
        DecodeBatch(model, size=1, context=4, cache="q5")
