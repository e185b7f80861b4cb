"""What fits a GPU: the total, the largest target, and what would suffice if nothing does."""

import math
import re
from pathlib import Path

import pytest
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.errors import BudgetUnreachable, ConfigError
from exl2flow.core.words import size
from exl2flow.engine.cache.paged import PagedCache, pages_of
from exl2flow.kernels import CACHE_FORMATS
from exl2flow.model import resolve
from exl2flow.model.config.spec import expected_tensors
from exl2flow.model.memory import host_embedding
from exl2flow.model.memory.footprint import DEVICE_BYTES, cache_bytes
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.fit import find_fit
from exl2flow.quant.forecast.preflight import preflight


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("fit") / "tiny", max_position_embeddings=2048)


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_cache_is_counted_as_it_is_reserved(source: Path, name: str) -> None:
    spec = resolve(source)
    cache = PagedCache(spec, pages=pages_of(300), form=CACHE_FORMATS[name], device="cpu")

    used = cache.nbytes * cache.pages // (cache.pages + 1)  # without the spare page
    assert cache_bytes(spec, context=300, cache_format=name) == used


def test_weights_and_everything_else_fill_the_memory(source: Path, tmp_path: Path) -> None:
    roomy = find_fit(small_config(source, tmp_path, fit={"memory": "24GB", "context": 256}))
    assert roomy is not None
    memory = roomy.needs.total + roomy.weights - 20_000
    config = small_config(source, tmp_path, fit={"memory": memory, "context": 256})

    tight = find_fit(config)

    assert tight is not None
    assert tight.weights + tight.needs.total == memory
    assert tight.bpw < roomy.bpw
    assert tight.target["target_bytes"] == tight.weights
    preflight(config.model_copy(update=tight.target), STAGES)


def test_a_large_embedding_is_in_host_memory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 2 * math.prod(expected_tensors(resolve(source))["model.embed_tokens.weight"])
    monkeypatch.setattr(host_embedding, "HOST_FROM", nbytes - 1)
    room = find_fit(small_config(source, tmp_path, fit={"memory": "24GB", "context": 256}))
    assert room is not None
    assert room.host == nbytes
    memory = room.needs.total + room.weights - room.host

    fit = find_fit(small_config(source, tmp_path, fit={"memory": memory, "context": 256}))

    assert fit is not None
    assert fit.weights == room.weights
    assert ("embedding", f"{size(nbytes)} of the weights, in host memory") in fit.rows()


def test_error_names_the_memory_that_would_suffice(source: Path, tmp_path: Path) -> None:
    memory = DEVICE_BYTES + 2_500_000
    config = small_config(source, tmp_path, fit={"memory": memory, "context": 2048})

    with pytest.raises(
        BudgetUnreachable, match="a shorter `--context` or a smaller `--cache`"
    ) as caught:
        find_fit(config)

    enough = str(caught.value).partition("`--fit ")[2].partition("`")[0]
    assert re.fullmatch(r"\d\.\dGB", enough)
    assert find_fit(small_config(source, tmp_path, fit={"memory": enough, "context": 2048}))
    less = f"{float(enough[:-2]) - 0.1:.1f}GB"
    with pytest.raises(BudgetUnreachable):
        find_fit(small_config(source, tmp_path, fit={"memory": less, "context": 2048}))


def test_usual_context_is_no_longer_than_the_model_reads(source: Path, tmp_path: Path) -> None:
    fit = find_fit(small_config(source, tmp_path, fit={"memory": "24GB"}))

    assert fit is not None
    assert fit.needs.context == 2048


@pytest.mark.parametrize("memory", [24, "24", "999999", "24kB"])
def test_sizes_without_their_unit_are_refused(
    memory: int | str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="too few; give the unit"):
        small_config(source, tmp_path, fit={"memory": memory})


def test_context_beyond_the_model_is_refused(source: Path, tmp_path: Path) -> None:
    config = small_config(source, tmp_path, fit={"memory": "24GB", "context": 4096})

    with pytest.raises(ConfigError, match="2048 positions"):
        find_fit(config)


def test_without_memory_nothing_changes(source: Path, tmp_path: Path) -> None:
    config = small_config(source, tmp_path)

    assert find_fit(config) is None
