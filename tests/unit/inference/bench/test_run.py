"""A model is timed within a limit, and what is left out is named."""

import time
from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.core.errors import ConfigError, SourceModelError
from exl2flow.inference import load_model
from exl2flow.inference.bench import bench, run
from exl2flow.inference.bench.run import BenchSession, affordable, read_in_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat no piece of work for long."""
    monkeypatch.setattr(run, "LONGEST", 0.01)


@pytest.mark.usefixtures("brief")
def test_prompts_and_steps_are_timed(folder: Path) -> None:
    said = list[str]()

    found = bench(folder, device="cpu", context=40, rows=(1, 3), report=said.append)

    done = [(timing.work, timing.rows, timing.context) for timing in found.timings]
    assert done == [("prompt", 1, 255), ("decode", 1, 40), ("decode", 3, 40)]
    assert all(timing.seconds > 0 for timing in found.timings)
    assert found.file_bytes < sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert found.file_bytes > 100_000
    assert (found.memory, found.copy_rate, found.omitted) == (None, None, ())
    assert found.cache == "fp32"
    assert said[-1] == "decoding 3 rows"


def test_a_slow_machine_reads_less_and_says_so(folder: Path) -> None:
    session = BenchSession(
        load_model(folder, device="cpu"), cache="fp32", seconds=0.0, report=lambda text: None
    )

    session.run(200, (1, 2))

    done = [(timing.work, timing.rows, timing.context) for timing in session.timings]
    assert done == [("prompt", 1, 32), ("decode", 1, 32)]
    assert session.omitted == [
        "a prompt of 255 tokens: too slow here",
        "decoding a row behind 200 tokens: too slow here",
        "decoding 2 rows: too slow here",
    ]


@pytest.mark.usefixtures("brief")
def test_a_long_context_ends_with_the_model(folder: Path) -> None:
    found = bench(folder, device="cpu", context=4000, rows=(1,))

    assert found.timings[-1].context == 255
    assert found.omitted == ("a context of 4000 tokens: more than the model has",)


@pytest.mark.usefixtures("brief")
def test_rows_without_room_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl2flow.engine.cache.paged.available_memory", lambda: 10**6)

    found = bench(folder, device="cpu", context=40, rows=(1, 1000))

    assert [timing.rows for timing in found.timings] == [1, 1]
    assert found.omitted == ("decoding 1000 rows: no room in memory",)


def test_a_small_model_takes_a_few_seconds(folder: Path) -> None:
    begun = time.monotonic()

    bench(folder, device="cpu")

    assert time.monotonic() - begun < 5 * run.LONGEST


@pytest.mark.parametrize(
    ("pace", "share", "tokens"), [(0.001, 2.0, 1000), (0.001, 0.5, 500), (0.1, 2.0, 32)]
)
def test_a_prompt_is_halved_until_it_fits(pace: float, share: float, tokens: int) -> None:
    assert affordable(1000, pace, share) == tokens


def test_a_short_prompt_stays() -> None:
    assert affordable(7, 1.0, 0.0) == 7


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_read_whole_only_where_it_is_the_head(tied: bool, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model", tie_word_embeddings=tied)
    model = load_model(folder, device="cpu")

    read = read_in_step(model.decoder, 10**9)

    assert read == 10**9 - (0 if tied else model.decoder.embedding.weight.nbytes)


def test_an_unknown_cache_or_a_folder_without_a_model_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no cache format `q5`"):
        bench(folder, device="cpu", cache="q5")
    with pytest.raises(SourceModelError, match=r"config\.json"):
        bench(tmp_path, device="cpu")
