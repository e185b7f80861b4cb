"""A tiny model with a context of 512 tokens, and its generator."""

from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.inference import Generator, LoadedModel, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu")


@pytest.fixture
def generator(model: LoadedModel) -> Generator:
    return Generator(model, tokens=1024, slots=1)
