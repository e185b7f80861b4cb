"""What works with a model that ranks share gives what one process gives; the rest is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import make_adapter
from checkpoints import make_checkpoint
from thread_ranks import ThreadRanks, on_both
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.filters import GrammarFilter
from exl2flow.engine.loading.layer_split import Split
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

TEXT = "The quick brown fox jumps over the lazy dog. " * 9
GREEDY = SamplingSettings.greedy()
Work = Callable[[LoadedModel], object]
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "serving.md"


def text(model: LoadedModel, request: Request | None = None, **options: object) -> list[int]:
    request = request or Request(TEXT, max_new_tokens=12, settings=GREEDY, stops=())
    events = Generator(model, slots=2, tokens=1024, **options).stream(request)
    return [token for event in events for token in event.ids]


def constrained(model: LoadedModel) -> list[int]:
    filters = (GrammarFilter(regex="[ab]{12}"),)
    return text(model, Request(TEXT, max_new_tokens=12, settings=GREEDY, filters=filters))


def hidden(model: LoadedModel) -> object:
    states = Generator(model, slots=2, tokens=1024).states.hidden([5, 6, 7], [9, 9], last=2)
    return [[round(float(x), 3) for x in row.flatten()[:4]] for row in states]


def of_experts(model: LoadedModel) -> list[int]:
    folder = model.spec.source_dir.with_name("experts")
    return text(load_model(folder, device="cpu", ranks=model.ranks))


WORKS: dict[str, Work] = {
    "drafts by n-grams": lambda model: text(model, draft=NgramDraft(tokens=3)),
    "draft models": lambda model: text(
        model, draft=Draft(model=load_model(model.spec.source_dir, device="cpu"), tokens=3)
    ),
    "quantized caches": lambda model: text(model, cache="q8"),
    "grammars": constrained,
    "hidden states": hidden,
    "experts": of_experts,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    make_tiny("qwen2-moe", folder / "experts", max_position_embeddings=1024)
    return make_tiny("llama", folder / "model", max_position_embeddings=1024)


@pytest.mark.parametrize("feature", WORKS)
def test_a_feature_gives_what_one_process_gives(folder: Path, feature: str) -> None:
    work = WORKS[feature]
    expected = work(load_model(folder, device="cpu"))

    found = on_both(lambda ranks: work(load_model(folder, device="cpu", ranks=ranks)))

    assert found == [expected] * 2


def kept(folder: Path, ranks: ThreadRanks) -> None:
    Generator(load_model(folder, device="cpu", ranks=ranks), keep=PromptCache(ram=1 << 20))


def adapted(folder: Path, ranks: ThreadRanks) -> None:
    model = load_model(folder, device="cpu", ranks=ranks)
    Adapter.load(make_adapter(folder.with_name(f"lora-{ranks.rank}"), folder), model)


def of_family(family: str) -> Callable[[Path, ThreadRanks], None]:
    def load(folder: Path, ranks: ThreadRanks) -> None:
        made = folder.with_name(f"{family}-{ranks.rank}")
        make = make_checkpoint if "." in family else make_tiny
        load_model(made if made.exists() else make(family, made), device="cpu", ranks=ranks)

    return load


REFUSED: dict[str, tuple[Callable[[Path, ThreadRanks], None], str]] = {
    "pages in host memory and on disk": (kept, "share a model keep no prompts"),
    "adapters": (adapted, "needs a whole model, not one that ranks share"),
    "layers with a state": (of_family("qwen3.5-text"), "layers with a state"),
    "layers split among GPUs": (
        lambda folder, ranks: load_model(folder, ranks=ranks, placement=Split()) and None,
        "neither split nor streamed",
    ),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_ranks_cannot_do_is_refused_by_name(folder: Path, feature: str) -> None:
    work, message = REFUSED[feature]

    with pytest.raises(ConfigError, match=message):
        work(folder, ThreadRanks(0, 2))


def test_the_documents_list_both() -> None:
    listed = DOCUMENT.read_text(encoding="utf-8").partition("## Several GPUs")[2]
    cells = [line.split("|") for line in listed.splitlines() if line.startswith("| ")]
    said = {cell[1].strip(): cell[3].strip() for cell in cells}

    assert {name for name, way in said.items() if way.startswith("yes")} == {*WORKS, "`--swap`"}
    assert {name for name, way in said.items() if way == "refused"} == {*REFUSED}
