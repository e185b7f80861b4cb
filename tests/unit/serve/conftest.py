"""What tests of the server share: a tiny model, and quick collections of garbage."""

import gc
from collections.abc import Iterator

import pytest
from tiny import make_tiny

from exl2flow.inference import LoadedModel, load_model
from exl2flow.serve.hosts import model_host


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_tiny("llama", tmp_path_factory.mktemp("tiny")), device="cpu")


@pytest.fixture(scope="package", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Let hosts pass over what was there before: libraries and tests take half a second."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_host, "only_new_are_collected", gc.collect)
        yield
    gc.unfreeze()
