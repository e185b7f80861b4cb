"""Fixtures of tests with a Hub: one for each test, this process as its client, models."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversions import small_config
from hub_server import Hub, serving, used_by_client
from tiny import make_tiny

from exl2flow.core.source import HubModel
from exl2flow.flows.local import run_locally
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


@pytest.fixture(scope="session")
def converted(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model, fetched from a Hub and converted at two bitrates; to be copied, not changed."""
    root = tmp_path_factory.mktemp("converted")
    with serving(root / "hub") as running, used_by_client(running):
        running.add_folder("org/tiny", tiny_source, card={"license": "mit"})
        config = small_config(Path("org/tiny"), root / "3bpw", bpw=3.0, work_root=root / "work")
        wanted = HubModel(repo="org/tiny")
        source = hub_tasks.fetch(wanted, config.work_dir_root, hub_tasks.Hub.open())
    folders = []
    for bpw in (3.0, 6.0):
        out = root / f"{bpw:g}bpw"
        run_locally(small_config(source, out, bpw=bpw, work_root=root / "work"))
        folders.append(out)
    return folders


@pytest.fixture
def models(converted: list[Path], tmp_path: Path) -> list[Path]:
    """Copies of the converted models."""
    return [shutil.copytree(folder, tmp_path / folder.name) for folder in converted]
