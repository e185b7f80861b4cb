"""A Hub for each test, and this process as its client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serving, used_by_client
from tiny import make_tiny

from exl2flow.tasks import hub as hub_tasks


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running Hub without repositories; nobody waits long between attempts."""
    monkeypatch.setattr(hub_tasks.Hub, "open", _impatient(hub_tasks.Hub.open))
    with serving(tmp_path / "hub") as running, used_by_client(running):
        yield running


def _impatient(opened: object) -> staticmethod:  # type: ignore[type-arg]
    def make(token: str | None = None) -> hub_tasks.Hub:
        return hub_tasks.Hub(api=opened(token).api, waits=(0.01, 0.02))  # type: ignore[operator]

    return staticmethod(make)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as it lies on the Hub: two shards, a licence, files that nobody needs."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", shards=2)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (folder / "LICENSE").write_text("MIT")
    (folder / "pytorch_model.bin").write_bytes(b"weights again")
    (folder / "tiny.gguf").write_bytes(b"and again")
    (folder / "consolidated.safetensors").write_bytes(b"and again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder
