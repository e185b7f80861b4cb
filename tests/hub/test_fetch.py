"""Models come from the Hub: pinned, resumable, only what is needed, compared with its digests."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_fixtures import get
from hub_server import TOKEN, Hub
from huggingface_hub import HfApi, constants

from exl2flow.core.errors import HubError, HubUnavailable, SourceModelError
from exl2flow.core.options.config import default_work_root
from exl2flow.core.runtime.progress import Tick, reporting_to
from exl2flow.core.store.source import HubModel, provenance
from exl2flow.pipeline.hub import client as client_module
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.hub.fetch import fetch, local_or_fetched

SHARD = "model-00001-of-00002.safetensors"
NEEDED = {
    "config.json",
    "tokenizer.json",
    "README.md",
    "LICENSE",
    "model.safetensors.index.json",
    SHARD,
    "model-00002-of-00002.safetensors",
}


def get_locally(source: str, root: Path) -> Path:
    """Return the folder of a source, fetched if it is none."""
    return local_or_fetched(
        Path(source), root, lambda wanted: fetch(wanted, root, hub_tasks.Hub.open())
    )


def interrupt(hub: Hub, root: Path) -> None:
    """Fetch a model of which a shard is missing, which then is there."""
    hub.fail(f"(GET|HEAD) .*/{SHARD}", "status", times=None, status=404)
    with pytest.raises(HubError, match="404"):
        get_locally("org/tiny", root)
    hub.faults.clear()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_files_are_flushed_before_their_digests_are_remembered(
    hub: Hub, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    remembered: list[bool] = []
    flush, remember = os.fsync, hub_tasks.digests

    def spy(handle: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        flush(handle)

    def remembering(paths: list[Path], memory: Path) -> dict[Path, str]:
        remembered.append({*paths, paths[0].parent} <= set(flushed))
        return remember(paths, memory)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(hub_tasks, "digests", remembering)

    folder = get("org/tiny", tmp_path)

    assert remembered == [True]
    assert {folder / name for name in NEEDED} <= set(flushed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None)),
        ("org/name@main", ("org/name", "main")),
        ("org/name-1.2_B@refs/pr/3", ("org/name-1.2_B", "refs/pr/3")),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("a/b/c", None),
        ("../name", None),
    ],
)
def test_names_on_the_hub_are_told_from_paths(
    text: str, expected: tuple[str, str | None] | None
) -> None:
    found = HubModel.of(text)

    assert (found and (found.repo, found.revision)) == expected


def test_only_needed_files_arrive_in_a_folder_named_after_the_commit(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    commit = hub.add_folder("org/tiny", tiny_source, card={"license": "mit"})

    folder = get("org/tiny", tmp_path)

    assert folder == tmp_path / "sources" / commit / "tiny"
    assert names(folder) == NEEDED
    assert all((folder / n).read_bytes() == (tiny_source / n).read_bytes() for n in NEEDED)
    assert provenance(folder) == {
        "repo": "org/tiny",
        "revision": None,
        "commit": commit,
        "license": "mit",
        "license_name": None,
        "license_link": None,
        "gated": False,
    }


def test_weights_in_subfolders_are_neither_fetched_nor_in_the_way(
    hub: Hub, tiny: str, tmp_path: Path
) -> None:
    tree = hub.repos["org/tiny"]["commits"][tiny]
    for name in (SHARD, "config.json", "model.safetensors.index.json"):
        tree = {**tree, f"checkpoint-500/{name}": tree[name]}
    hub.commit("org/tiny", "main", tree)

    folder = get("org/tiny", tmp_path)

    assert names(folder) == NEEDED
    assert not (folder / "checkpoint-500").exists()


def test_weights_in_a_subfolder_alone_are_no_model(hub: Hub, tiny: str, tmp_path: Path) -> None:
    tree = hub.repos["org/tiny"]["commits"][tiny]
    hub.commit("org/tiny", "main", {f"original/{name}": entry for name, entry in tree.items()})

    with pytest.raises(SourceModelError, match=r"no \*\.safetensors at its top level"):
        get("org/tiny", tmp_path)

    assert not hub.asked("/resolve/")


def test_a_revision_is_resolved_first_and_pinned(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    old = hub.add_folder("org/tiny", tiny_source)
    hub.commit("org/tiny", "main", {"README.md": hub.entry(b"gone", is_lfs=False)})

    folder = get(f"org/tiny@{old}", tmp_path)

    assert folder.parent.name == old
    assert all(old in r.path for r in hub.asked("/resolve/"))
    with pytest.raises(HubError, match="no such revision"):
        get("org/tiny@nowhere", tmp_path)


def test_a_second_fetch_downloads_nothing(hub: Hub, tiny: str, tmp_path: Path) -> None:
    first = get("org/tiny", tmp_path)
    before = len(hub.asked("/resolve/|/objects/"))

    assert get("org/tiny", tmp_path) == first
    assert len(hub.asked("/resolve/|/objects/")) == before


def test_progress_reaches_the_whole_size(hub: Hub, tiny: str, tmp_path: Path) -> None:
    ticks: list[Tick] = []

    with reporting_to(ticks.append):
        get("org/tiny", tmp_path)

    assert (ticks[-1].stage, ticks[-1].done) == ("fetch", ticks[-1].total)


def test_a_connection_cut_within_a_file_goes_on_where_it_was(
    hub: Hub, tiny: str, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hub.repos["org/tiny"]["commits"][hub.head("org/tiny", "main")][SHARD]["sha256"]
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # of what is kept
    hub.fail(f"GET /objects/{sha256}", "cut", after=1000)

    folder = get("org/tiny", tmp_path)

    requests = hub.asked(f"GET /objects/{sha256}")
    assert [r.headers.get("range") for r in requests] == [None, "bytes=1000-"]
    assert (folder / SHARD).read_bytes() == (tiny_source / SHARD).read_bytes()


def test_a_fetch_that_failed_keeps_its_finished_files(hub: Hub, tiny: str, tmp_path: Path) -> None:
    interrupt(hub, tmp_path)
    (folder,) = (tmp_path / "sources").glob("*/tiny")
    finished = names(folder)
    hub.requests.clear()

    get("org/tiny", tmp_path)

    asked_again = {name for name in finished for r in hub.asked("GET /org") if name in r.path}
    assert provenance(folder) is not None
    assert finished
    assert SHARD not in finished
    assert not asked_again


def test_a_fetch_goes_on_beside_the_folder_that_it_made(
    hub: Hub, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work_root = default_work_root(Path("org/tiny-4bpw"))
    interrupt(hub, work_root)

    folder = get_locally("org/tiny", work_root)

    assert folder.is_relative_to(tmp_path / "org")
    assert names(folder) == NEEDED


@pytest.mark.parametrize(("name", "kind"), [(SHARD, "sha256"), ("tokenizer.json", "git")])
def test_bytes_that_differ_from_the_digest_are_fetched_again(
    hub: Hub, tiny: str, tmp_path: Path, name: str, kind: str
) -> None:
    sha256 = hub.repos["org/tiny"]["commits"][tiny][name]["sha256"]
    sound = hub.path_of(sha256).read_bytes()
    hub.path_of(sha256).write_bytes(sound[:-1] + b"?")

    with pytest.raises(HubUnavailable) as raised:
        get("org/tiny", tmp_path)

    assert f"`{name}` of `org/tiny` arrived with {kind}" in str(raised.value)
    assert kind == "git" or len(hub.asked(f"GET /objects/{sha256}")) == 3
    hub.path_of(sha256).write_bytes(sound)
    assert (get("org/tiny", tmp_path) / name).read_bytes() == sound


def test_all_files_that_a_power_cut_tore_are_fetched_again_at_once(
    hub: Hub, tiny: str, tiny_source: Path, tmp_path: Path
) -> None:
    interrupt(hub, tmp_path)
    (folder,) = (tmp_path / "sources").glob("*/tiny")
    torn = names(folder)
    for name in torn:  # the client's own records, which call them complete, were written before
        (folder / name).write_bytes(b"")

    get("org/tiny", tmp_path)

    assert len(torn) > 3  # more than there are attempts
    assert all((folder / name).read_bytes() == (tiny_source / name).read_bytes() for name in torn)


def test_an_outage_that_passes_is_waited_for(
    hub: Hub, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("GET /api/models", "status", status=502)

    with caplog.at_level(logging.WARNING, "exl2flow"):
        assert get("org/tiny", tmp_path).is_dir()

    assert "the Hub answered 502 (Bad Gateway) for `org/tiny`; next attempt in" in caplog.text


def test_an_outage_that_stays_is_an_error_that_can_be_retried(hub: Hub, tmp_path: Path) -> None:
    hub.fail("GET /api/models", "status", times=None, status=503)

    with pytest.raises(HubUnavailable, match="the Hub answered 503") as raised:
        get("org/tiny", tmp_path)

    assert raised.value.retryable
    assert len(hub.asked("GET /api/models/org/tiny")) == 3


def test_the_hub_says_how_long_to_wait(
    hub: Hub, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail("GET /api/models", "status", status=429, headers={"Retry-After": "7"})
    waited: list[float] = []
    monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=waited.append))

    get("org/tiny", tmp_path)

    assert waited == [7.0]


def test_nobody_waits_for_hours(hub: Hub, tmp_path: Path) -> None:
    hub.fail("GET /api/models", "status", status=429, headers={"Retry-After": "86400"})

    with pytest.raises(HubUnavailable, match="429"):
        get("org/tiny", tmp_path)


def test_a_hub_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.fail("GET /api/models", "cut", times=None)

    with pytest.raises(HubUnavailable, match="the Hub cannot be reached for `org/tiny`"):
        get("org/tiny", tmp_path)


@pytest.mark.parametrize(("has_answered", "attempts"), [(False, 1), (True, 3)])
def test_a_name_without_an_address_is_not_waited_for_at_the_first_request(
    has_answered: bool, attempts: int
) -> None:
    hub = hub_tasks.Hub(api=HfApi(endpoint="http://nowhere.invalid"), waits=(0.0, 0.0))
    asked: list[str] = []
    if has_answered:
        hub.call("org/tiny", lambda: None)

    with pytest.raises(HubUnavailable, match=r"reached for `org/tiny`.*http://nowhere\.invalid"):
        hub.call("org/tiny", lambda: (asked.append("tiny"), hub.api.model_info("org/tiny")))

    assert len(asked) == attempts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hub: hub.repos.clear(), "no `org/tiny` on the Hub, or it is private"),
        (lambda hub: hub.tokens.clear(), "does not accept the token.*HF_TOKEN"),
        (
            lambda hub: hub.repos["org/tiny"].update(gated="manual"),
            r"gated: accept its terms at http://127.0.0.1:\d+/org/tiny",
        ),
    ],
)
def test_what_cannot_pass_is_not_tried_again(
    hub: Hub, tiny: str, tmp_path: Path, change: Any, message: str
) -> None:
    change(hub)

    with pytest.raises(HubError, match=message) as raised:
        get("org/tiny", tmp_path)

    assert not raised.value.retryable
    assert len(hub.asked("GET /api/models/org/tiny$")) == 1


def test_terms_that_were_accepted_open_a_gated_model(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    hub.add_folder("org/tiny", tiny_source, gated="manual", granted=[TOKEN])

    found = provenance(get("org/tiny", tmp_path))

    assert found is not None
    assert found["gated"]


def test_other_formats_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.create("org/tiny")

    with pytest.raises(SourceModelError, match=r"has no \*\.safetensors at its top"):
        get("org/tiny", tmp_path)


def test_a_folder_goes_before_a_name_on_the_hub(
    hub: Hub, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)

    assert get_locally("org/tiny", tmp_path) == Path("org/tiny")
    assert not hub.requests


def test_the_storage_never_sees_a_token(hub: Hub, tiny_source: Path, tmp_path: Path) -> None:
    hub.add_folder("org/tiny", tiny_source, private=True)

    get("org/tiny", tmp_path)

    seen = {r.server: r.token for r in hub.requests}
    assert seen == {"hub": TOKEN, "storage": None}
