"""The tiny model that most tests of the generator use; a file may have a `model` of its own."""

from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.engine.drafts.costs import StepCosts
from exl2flow.inference import Generator, LoadedModel, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu", max_tokens=1024)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let texts draft as much as may be, also what was never accepted."""
    monkeypatch.setattr(StepCosts, "best", lambda _self, _slots, _kind, _rate, most: most)
    monkeypatch.setattr(
        StepCosts, "shared", lambda _self, _slots, _kind, texts: max(n for _, n in texts)
    )


@pytest.fixture(scope="module")
def generator(model: LoadedModel) -> Generator:
    return Generator(model, tokens=4096, slots=4)
