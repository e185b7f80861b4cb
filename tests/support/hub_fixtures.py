"""Fixtures of tests with a Hub: one for each test, this process as its client, models."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversions import small_config
from hub_server import Hub, serving, used_by_client
from made_once import made_once
from tiny import make_tiny

from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.store.source import HubModel
from exl2flow.core.store.stage import FILES, RECORD_FILE
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.hub.publish import Published, publish
from exl2flow.pipeline.local import run_locally

REPO = "org/tiny-exl2"


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
    folder = make_tiny(
        "llama", tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=1, shards=2
    )
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (folder / "LICENSE").write_text("MIT")
    (folder / "pytorch_model.bin").write_bytes(b"weights again")
    (folder / "tiny.gguf").write_bytes(b"and again")
    (folder / "consolidated.safetensors").write_bytes(b"and again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def tiny(hub: Hub, tiny_source: Path) -> str:
    """The commit of the model on the Hub, as `org/tiny`."""
    return hub.add_folder("org/tiny", tiny_source)


@pytest.fixture(scope="session")
def converted(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model, fetched from a Hub and converted at two bitrates; to be copied, not changed."""

    def convert(root: Path) -> None:
        with serving(root / "hub") as running, used_by_client(running):
            running.add_folder("org/tiny", tiny_source, card={"license": "mit"})
            config = small_config(Path("org/tiny"), root / "3bpw", bpw=3.0, work_root=root / "work")
            wanted = HubModel(repo="org/tiny")
            source = hub_tasks.fetch(wanted, config.work_dir_root, hub_tasks.Hub.open())
        for bpw in (3.0, 6.0):
            out = root / f"{bpw:g}bpw"
            run_locally(small_config(source, out, bpw=bpw, work_root=root / "work"))

    root = made_once(tmp_path_factory, "converted", convert)
    return [root / "3bpw", root / "6bpw"]


@pytest.fixture
def models(converted: list[Path], tmp_path: Path) -> list[Path]:
    """Copies of the converted models."""
    return [shutil.copytree(folder, tmp_path / folder.name) for folder in converted]


def get(wanted: str, root: Path, *, renew: bool = False) -> Path:
    """Fetch a model with the token of the environment."""
    model = HubModel.of(wanted)
    assert model is not None
    return hub_tasks.fetch(model, root, hub_tasks.Hub.open(), renew=renew)


def run(models: list[Path], **values: Any) -> Published:
    """Publish with the token of the environment."""
    known = {"models": models, "repo": REPO, "device": "cpu", "max_kl": 100, **values}
    return publish(PublishConfig.model_validate(known), hub_tasks.Hub.open())


def shards(hub: Hub, repo: str = "org/tiny") -> dict[str, Path]:
    """Return path on the storage → file of each shard, of all commits."""
    trees = hub.repos[repo]["commits"].values()
    entries = [(path.rpartition("/")[2], entry) for tree in trees for path, entry in tree.items()]
    weights = [e["sha256"] for name, e in entries if name.startswith("model") and e["lfs"]]
    return {f"/objects/{sha256}": hub.path_of(sha256) for sha256 in weights}


def weights_served(hub: Hub, repo: str = "org/tiny") -> int:
    """Return how many bytes behind the headers of shards were asked for."""
    files, total = shards(hub, repo), 0
    for request in hub.requests:
        if request.method == "GET" and request.path in files:
            data = files[request.path].read_bytes()
            header = 8 + int.from_bytes(data[:8], "little")
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
            begin, end = (int(match[1]), int(match[2]) + 1) if match else (0, len(data))
            total += max(0, end - max(begin, header))
    return total


def change(path: Path, **values: Any) -> None:
    """Change entries of a JSON file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def is_public(hub: Hub) -> bool:
    return REPO in hub.repos and not hub.repos[REPO]["private"]


def add_file(model: Path, name: str, content: bytes) -> Path:
    """Add a file to an output, as if its conversion had written it."""
    record = json.loads((model / RECORD_FILE).read_bytes())
    change(model / RECORD_FILE, files=sorted({*record[FILES], name}))
    path = model / name
    path.write_bytes(content)
    return path
