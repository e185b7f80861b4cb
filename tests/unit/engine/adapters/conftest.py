"""The model whose linears adapters change."""

from pathlib import Path

import pytest
from tiny import make_tiny

from exl2flow.inference import LoadedModel, load_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(source: Path) -> LoadedModel:
    return load_model(source, device="cpu")
