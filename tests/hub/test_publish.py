"""Models go to the Hub: private, verified, then public; nothing is sent twice."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_fixtures import REPO, add_file, change, is_public, run
from hub_server import PART_BYTES, TOKEN, Hub

from exl2flow.core.errors import ConfigError, PublicationDamaged
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.pipeline.hub import fetch as hub_tasks
from exl2flow.pipeline.hub.repository import Repository

BRANCHES = {"3.0bpw", "6.0bpw"}
SENDS = r"(PUT|POST) /(uploads|completed|api/models/.*/commit)"


def test_two_bitrates_end_public_and_verified(hub: Hub, models: list[Path], tmp_path: Path) -> None:
    measurement = tmp_path / "measurement.json"
    measurement.write_text("{}")

    published = run(models, measurement=measurement)

    assert is_public(hub)
    assert set(published.branches) == BRANCHES | {"main"}
    assert set(hub.files(REPO)) == {".gitattributes", "README.md", "measurement.json"}
    for folder, branch in zip(models, sorted(BRANCHES), strict=True):
        files = hub.files(REPO, branch)
        assert set(files) == {path.name for path in folder.iterdir()} | {".gitattributes"}
        weights = (folder / "model.safetensors").read_bytes()
        assert files["model.safetensors"] == weights
        assert files["README.md"] == hub.files(REPO)["README.md"]
    order = [r.path for r in hub.requests if r.path.endswith(("/create", "/settings"))]
    assert order == ["/api/repos/create", f"/api/models/{REPO}/settings"]
    assert json.loads(hub.asked("POST /api/repos/create")[0].body)["visibility"] == "private"
    assert hub.requests.index(hub.asked("PUT .*settings")[0]) > hub.requests.index(
        hub.asked("GET /objects/")[-1]
    )


def test_a_repeated_publish_sends_and_downloads_nothing(hub: Hub, models: list[Path]) -> None:
    first = run(models)
    hub.requests.clear()

    second = run(models)

    assert first.sent
    assert second.sent == ()
    assert second.branches == first.branches
    assert not hub.asked(f"{SENDS}|/objects/|PUT .*settings")
    assert is_public(hub)


def test_the_download_of_a_killed_publish_is_deleted(hub: Hub, models: list[Path]) -> None:
    left = models[0].parent / ".exl2flow" / "published" / REPO.replace("/", "--")
    left.mkdir(parents=True)
    (left / "never-sent").touch()

    run(models[:1])

    assert not left.exists()
    left.mkdir()  # its deletion failed, behind the last branch
    run(models[:1])
    assert not left.exists()


def test_another_bitrate_joins_the_card(hub: Hub, models: list[Path]) -> None:
    run(models[:1])
    alone = hub.files(REPO)["README.md"].decode()

    second = run(models[1:])

    card = hub.files(REPO)["README.md"].decode()
    assert "6.0bpw" not in alone
    assert "| [3.0bpw]" in card
    assert "| [6.0bpw]" in card
    assert all(not name.startswith("3.0bpw") for name in second.sent)


def test_private_stays_private(hub: Hub, models: list[Path]) -> None:
    assert run(models, private=True).private
    assert not is_public(hub)


def test_large_files_go_in_several_parts(hub: Hub, models: list[Path]) -> None:
    longer = (models[0] / "model.safetensors").read_bytes() + b"\0" * 3 * PART_BYTES
    extra = add_file(models[0], "more.safetensors", longer)
    hub.fail("PUT /uploads/.*/2", "cut", after=PART_BYTES // 2)

    with pytest.raises(PublicationDamaged, match="does not run"):
        run(models[:1])

    parts = [r.path.rpartition("/")[2] for r in hub.asked(r"PUT /uploads/\w+/\d")]
    assert parts == ["1", "2", "2", "3", "4"]
    assert hub.files(REPO, "3.0bpw")["more.safetensors"] == extra.read_bytes()
    assert not is_public(hub)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_upload_never_becomes_public(hub: Hub, models: list[Path], name: str) -> None:
    where = "PUT /uploads/" if name.endswith(".safetensors") else "nothing"
    hub.fail(where, "damage")
    if where == "nothing":
        keep(hub, models[0] / name)

    with pytest.raises(PublicationDamaged, match=f"`{REPO}` branch .*bpw: .*sha256.*private"):
        run(models)

    assert not is_public(hub)
    with pytest.raises(PublicationDamaged):  # nor by repeating
        run(models)
    assert not is_public(hub)
    assert not [r for r in hub.asked("PUT .*settings") if b"public" in r.body]


def keep(hub: Hub, path: Path) -> None:
    """Let the Hub's disk hold something else than this file, of the same size."""
    stored = hub.store

    def store(data: bytes) -> str:
        sha256 = stored(data)
        if data == path.read_bytes():
            hub.path_of(sha256).write_bytes(b"?" + data[1:])
        return sha256

    hub.store = store  # type: ignore[method-assign]


def test_damage_found_later_hides_what_was_public(hub: Hub, models: list[Path]) -> None:
    run(models)
    shutil.rmtree(models[0].parent / ".exl2flow")  # what was proved is forgotten
    entry = hub.repos[REPO]["commits"][hub.head(REPO, "6.0bpw")]["model.safetensors"]
    hub.path_of(entry["sha256"]).write_bytes(b"?" * entry["size"])

    with pytest.raises(PublicationDamaged):
        run(models)

    assert not is_public(hub)


def test_an_upload_that_failed_goes_on(hub: Hub, models: list[Path]) -> None:
    hub.fail("POST /api/models/.*/commit/6", "status", status=400)
    with pytest.raises(hub_tasks.HubError, match="400"):
        run(models)
    hub.requests.clear()

    published = run(models)

    assert is_public(hub)
    assert not hub.asked("PUT /uploads/")  # its objects were there already
    assert all(name.startswith(("6.0bpw/", "main/")) for name in published.sent)


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub: Hub, models: list[Path]) -> None:
    run(models[:1])
    lost = hub.head(REPO, "3.0bpw")
    assert lost is not None
    hub.requests.clear()
    add_file(models[0], "NOTICE.txt", b"new")
    hub.fail("POST /api/models/.*/commit/3", "lose")

    run(models[:1])

    assert len(hub.asked("POST /api/models/.*/commit/3")) == 1


def test_a_network_that_fails_for_a_while_is_waited_for(hub: Hub, models: list[Path]) -> None:
    for where in ("POST /api/repos/create", "PUT /uploads", "POST .*batch", "POST .*/commit/3"):
        hub.fail(where, "status", status=500)
    hub.fail("POST .*/branch/", "status", status=429, headers={"Retry-After": "0"})
    hub.fail("PUT .*settings", "cut")
    hub.fail("GET /objects/", "cut", after=100)

    run(models)

    assert is_public(hub)
    assert not [fault for fault in hub.faults if fault.times]


def test_an_expired_token_is_found_before_anything_is_done(hub: Hub, models: list[Path]) -> None:
    hub.tokens.clear()

    with pytest.raises(hub_tasks.HubError, match="missing, wrong or expired; set HF_TOKEN"):
        run(models)

    assert REPO not in hub.repos
    assert not hub.asked("POST|PUT")


def test_without_a_token_nothing_is_tried(
    hub: Hub, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)

    with pytest.raises(hub_tasks.HubError, match="there is none; set HF_TOKEN") as caught:
        run(models)

    assert not isinstance(caught.value, hub_tasks.HubUnavailable)
    assert REPO not in hub.repos


def test_a_token_that_expires_on_the_way_leaves_it_private(hub: Hub, models: list[Path]) -> None:
    hub.fail("POST .*/commit/6", "status", times=None, status=401)

    with pytest.raises(hub_tasks.HubError, match="expired"):
        run(models)

    assert not is_public(hub)


def test_a_foreign_organization_is_refused_with_advice(hub: Hub, models: list[Path]) -> None:
    with pytest.raises(hub_tasks.HubError, match="write access"):
        run(models, repo="stranger/tiny-exl2")


def test_folders_of_others_and_twins_are_usage_errors(
    hub: Hub, models: list[Path], tiny_source: Path, tmp_path: Path
) -> None:
    twin = shutil.copytree(models[0], tmp_path / "twin")
    with pytest.raises(ConfigError, match=r"several folders belong to branch `3\.0bpw`"):
        run([models[0], twin])
    with pytest.raises(ConfigError, match=f"has no {RECORD_FILE}"):
        run([tiny_source])
    change(models[0] / RECORD_FILE, provenance={"repo": "org/other", "commit": "0"})
    with pytest.raises(ConfigError, match="several sources"):
        run(models)


def test_branches_are_listed_once_to_be_proved(hub: Hub, models: list[Path]) -> None:
    run(models)
    hub.requests.clear()

    run(models)

    # once for the bitrates that are there already, once for the commits
    assert len(hub.asked(f"GET /api/models/{REPO}/refs")) == 2


def test_files_put_into_a_folder_are_not_published(hub: Hub, models: list[Path]) -> None:
    (models[0] / "my-notes.txt").write_text("secret")

    run(models[:1])

    assert "my-notes.txt" not in hub.files(REPO, "3.0bpw")


def test_paths_of_this_machine_are_not_published(hub: Hub, models: list[Path]) -> None:
    run(models)

    for branch in BRANCHES:
        for name, content in hub.files(REPO, branch).items():
            assert str(models[0].parent.parent).encode() not in content, name
            assert b"/tmp/" not in content or name.endswith(".safetensors"), name


def test_only_the_hub_sees_the_token(hub: Hub, models: list[Path]) -> None:
    run(models)

    assert {r.token for r in hub.requests if r.server == "storage"} == {None}
    assert TOKEN in {r.token for r in hub.requests if r.server == "hub"}


def test_a_signal_while_verifying_ends_the_run_and_leaves_no_download(
    hub: Hub, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(self: object, commit: str, place: Path, names: object) -> None:
        (place / "model.safetensors").touch()
        raise SystemExit(143)

    def refuse(path: Path | str, **options: Any) -> None:
        if Path(path).is_relative_to(left):  # rmtree passes whole paths here
            raise OSError(errno.ENOTEMPTY, "a thread of the download still writes there")
        rmdir(path, **options)

    rmdir, left = os.rmdir, models[0].parent / ".exl2flow"

    with monkeypatch.context() as patch:
        patch.setattr(Repository, "download", download)
        patch.setattr(os, "rmdir", refuse)
        with pytest.raises(SystemExit):
            run(models)
    run(models)

    assert is_public(hub)
    assert [path.name for path in left.rglob("*") if path.is_dir()] == ["published"]
