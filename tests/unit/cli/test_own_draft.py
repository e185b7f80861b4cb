"""What `chat` and `serve` draft with if nothing is said: the model's own block."""

from pathlib import Path

import pytest
from mtp_checkpoints import with_block
from tiny import make_tiny

from exl2flow.cli.work.loading import load_draft, with_own_draft
from exl2flow.core.errors import ConfigError, OutOfDeviceMemory
from exl2flow.core.options.generation import LoadOptions
from exl2flow.engine import Generator, HybridDraft, LoadedModel, Mtp, NgramDraft, load_model
from exl2flow.engine.drafts import Drafter
from exl2flow.engine.drafts.mtp import MtpProposer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    source, _, _ = with_block("qwen3.5-text", tmp_path_factory.mktemp("own") / "model")
    return load_model(source, device="cpu", max_tokens=256)


def made(model: LoadedModel, **options: object) -> list[type | None]:
    """Return the kinds of drafts with which generators were made, the last one with success."""
    kinds = list[type | None]()

    def make(draft: Drafter | None) -> Generator:
        kinds.append(None if draft is None else type(draft))
        return Generator(model, tokens=256, slots=1, draft=draft)

    with_own_draft(LoadOptions(**options), model, make)()  # type: ignore[arg-type]  # by name
    return kinds


def test_the_block_drafts_unless_something_else_is_asked_for(model: LoadedModel) -> None:
    assert made(model) == [Mtp]
    assert made(model, ngram=True) == [HybridDraft]
    assert made(model, draft="mtp", draft_tokens=2) == [Mtp]
    assert made(model, draft="none") == [None]
    assert made(model, draft="none", ngram=True) == [NgramDraft]


def test_models_without_a_block_are_not_drafted_for(tmp_path: Path) -> None:
    other = load_model(make_tiny("llama", tmp_path / "tiny"), device="cpu", max_tokens=256)

    assert made(other) == [None]
    with pytest.raises(ConfigError, match="has no block that drafts tokens"):
        made(other, draft="mtp")


def test_a_block_that_does_not_fit_is_left_out_unless_asked_for(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OutOfDeviceMemory("a cache of 256 tokens does not fit")

    monkeypatch.setattr(MtpProposer, "__init__", refuse)

    assert made(model, ngram=True) == [HybridDraft, NgramDraft]
    assert "the MTP block is left out" in capsys.readouterr().err
    with pytest.raises(OutOfDeviceMemory):
        made(model, draft="mtp")


def test_words_are_no_folders_but_paths_of_that_name_are(model: LoadedModel) -> None:
    assert LoadOptions(draft="mtp").draft_folder is None
    assert LoadOptions(draft="./mtp").draft_folder == Path("mtp")
    assert load_draft(LoadOptions(draft="none"), model) is None
