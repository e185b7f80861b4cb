"""A work root keeps the commit that it began with, whatever happens on the Hub."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hub_fixtures import get
from hub_server import Hub
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import HubError, HubUnavailable
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.hub.fetch import PINS_FILE

SHARD = "model-00001-of-00002.safetensors"


def move(hub: Hub) -> str:
    """Let `main` have another commit, and return it."""
    before = hub.head("org/tiny", "main")
    assert before is not None
    tree = hub.repos["org/tiny"]["commits"][before]
    return hub.commit("org/tiny", "main", {**tree, "NOTICE": hub.entry(b"moved", is_lfs=False)})


def test_a_commit_that_is_here_needs_no_request(hub: Hub, tiny: str, tmp_path: Path) -> None:
    folder = get("org/tiny", tmp_path)
    hub.requests.clear()

    assert get(f"org/tiny@{tiny}", tmp_path) == folder
    assert not hub.requests


@pytest.mark.parametrize("has_pins", [True, False])
@pytest.mark.parametrize("kind", ["cut", "status"])
def test_without_the_hub_a_branch_is_the_commit_that_was_begun(
    hub: Hub, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, has_pins: bool
) -> None:
    folder = get("org/tiny", tmp_path)
    if not has_pins:  # as versions left it that had none
        (tmp_path / PINS_FILE).unlink()
    hub.fail(".", kind, times=None)  # type: ignore[arg-type]
    hub.requests.clear()

    with caplog.at_level(logging.WARNING, "exl2flow"):
        assert get("org/tiny", tmp_path) == folder

    assert "cannot check whether `main` of `org/tiny` has moved" in caplog.text
    assert f"using commit {folder.parent.name}" in caplog.text
    assert len(hub.requests) == 1  # nobody waits for what is not needed


def test_a_model_that_is_not_here_needs_the_hub(hub: Hub, tiny: str, tmp_path: Path) -> None:
    get("org/tiny", tmp_path)
    hub.fail(".", "cut", times=None)

    for wanted in ("org/tiny@v2", "org/other", f"org/tiny@{'a' * 40}"):
        with pytest.raises(HubUnavailable):
            get(wanted, tmp_path)


def test_a_branch_that_moved_does_not_change_the_model(
    hub: Hub, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = get("org/tiny", tmp_path)
    moved = move(hub)

    with caplog.at_level(logging.WARNING, "exl2flow"):
        assert get("org/tiny", tmp_path) == folder
        assert get("org/tiny@main", tmp_path) == folder

    assert f"`main` of `org/tiny` has moved to commit {moved}; using" in caplog.text
    assert f"use `--restart`, or name it: `org/tiny@{moved}`" in caplog.text
    assert get(f"org/tiny@{moved}", tmp_path).parent.name == moved
    assert get("org/tiny", tmp_path) == folder


def test_renewing_takes_the_new_commit_from_then_on(hub: Hub, tiny: str, tmp_path: Path) -> None:
    get("org/tiny", tmp_path)
    moved = move(hub)

    renewed = get("org/tiny", tmp_path, renew=True)

    assert renewed.parent.name == moved
    assert (renewed / "NOTICE").read_text() == "moved"
    assert get("org/tiny", tmp_path) == renewed


def test_a_download_that_was_cut_goes_on_with_its_commit(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    begun = hub.add_folder("org/tiny", tiny_source)
    hub.fail(f"(GET|HEAD) .*/{SHARD}", "status", times=None, status=404)
    with pytest.raises(HubError, match="404"):
        get("org/tiny", tmp_path)
    hub.faults.clear()
    move(hub)

    folder = get("org/tiny", tmp_path)

    assert folder.parent.name == begun
    assert (folder / SHARD).is_file()


def test_restart_takes_the_new_commit(
    hub: Hub, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = hub.add_folder("org/tiny", tiny_source)
    words = ["convert", "org/tiny", "--out", "out", "--dry-run", "--device", "cpu", "--json"]
    words += ["--rows", "2", "--measure-rows", "1", "--row-tokens", "64"]
    words += ["--measure-row-tokens", "64"]
    root = tmp_path / ".exl2flow"
    get("org/tiny", root)
    moved = move(hub)

    again = CliRunner().invoke(app, words)
    anew = CliRunner().invoke(app, [*words, "--restart"])

    assert again.exit_code == anew.exit_code == 0, anew.output
    assert f"is commit {begun}" in again.stderr
    assert f"is commit {moved}" in anew.stderr
    assert json.loads((root / PINS_FILE).read_text()) == {"org/tiny@main": begun}
    assert get("org/tiny", root, renew=True).parent.name == moved
    assert json.loads((root / PINS_FILE).read_text()) == {"org/tiny@main": moved}


def test_fetches_that_begin_at_once_keep_all_pins(
    hub: Hub, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repos = [f"org/tiny-{number}" for number in range(3)]
    commits = {f"{repo}@main": hub.add_folder(repo, tiny_source) for repo in repos}
    begun = threading.Barrier(len(repos))
    read = hub_tasks.read_object

    def at_once(path: Path) -> dict[str, Any]:
        found = read(path)
        with suppress(threading.BrokenBarrierError):  # where others wait, nobody comes
            begun.wait(0.5)
        return found

    monkeypatch.setattr(hub_tasks, "pinned_commit", lambda wanted, root: None)
    monkeypatch.setattr(hub_tasks, "read_object", at_once)
    with ThreadPoolExecutor(len(repos)) as pool:
        list(pool.map(lambda repo: get(repo, tmp_path), repos))

    assert json.loads((tmp_path / PINS_FILE).read_text()) == commits
