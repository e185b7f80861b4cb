"""Fingerprints of source models."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exl2flow.core.errors import SourceModelError
from exl2flow.core.store import source as source_module
from exl2flow.core.store.files import digest, digest_of
from exl2flow.core.store.source import (
    DIGESTS_FILE,
    PROVENANCE,
    HubModel,
    SourceFingerprint,
    hub_model,
    provenance,
    provenance_file,
)
from exl2flow.core.store.store import WorkDir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "My Model (v1)"
    folder.mkdir()
    save_file({"a": torch.zeros(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "work" / "digests.json"


def fingerprint(model: Path, memory: Path) -> str:
    return SourceFingerprint.of(model, memory=memory).fingerprint


def test_slug_is_a_plain_file_name(model: Path, memory: Path) -> None:
    assert SourceFingerprint.of(model, memory=memory).slug == "my-model-v1"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Llama-3.1_8B", "llama-3.1_8b"),
        ("Xwin", "xwin"),
        (".-a-.", "a"),
        ("a  & b", "a-b"),
        ("モデル", "model"),
        ("-", "model"),
    ],
)
def test_slug_is_never_hidden_nor_an_option_nor_empty(
    name: str, slug: str, model: Path, memory: Path
) -> None:
    named = model.rename(model.with_name(name))

    assert SourceFingerprint.of(named, memory=memory).slug == slug


@pytest.mark.parametrize(
    ("name", "value", "is_same"),
    [
        ("measurement.safetensors", 0.0, True),  # beside the weights
        ("model.safetensors", 1.0, False),  # with the same header
    ],
)
def test_fingerprint_is_that_of_the_weights_contents(
    name: str, value: float, is_same: bool, model: Path, memory: Path
) -> None:
    before = fingerprint(model, memory)

    save_file({"a": torch.full((8,), value)}, model / name)

    assert (fingerprint(model, memory) == before) == is_same


SECOND_COPY = "consolidated.safetensors"


def test_second_copy_of_the_weights_is_neither_the_source_nor_read(
    model: Path, memory: Path
) -> None:
    before = SourceFingerprint.of(model, memory=memory)

    save_file({"a": torch.ones(8)}, model / SECOND_COPY)

    assert SourceFingerprint.of(model, memory=memory) == before
    assert SECOND_COPY not in memory.read_text()


def test_second_copy_that_is_the_only_one_is_the_source(model: Path, memory: Path) -> None:
    (model / "model.safetensors").rename(model / SECOND_COPY)

    assert SECOND_COPY in SourceFingerprint.of(model, memory=memory).files


def older(model: Path, memory: Path) -> str:
    """Return the fingerprint of older versions, in which second copies counted."""
    paths = [path for path in sorted(model.iterdir()) if path.is_file()]
    found = source_module.digests(paths, memory)
    return digest_of({path.name: sha256 for path, sha256 in found.items()})


@pytest.mark.parametrize("now", ["there", "deleted", "moved"])
def test_work_root_that_knows_a_second_copy_goes_on(model: Path, memory: Path, now: str) -> None:
    save_file({"a": torch.ones(8)}, model / SECOND_COPY)
    begun = older(model, memory)
    made = memory.parent / f"{model.name}-{begun[:12]}"
    assert fingerprint(model, memory) != begun  # nothing was made with it
    made.mkdir()

    if now == "deleted":
        (model / SECOND_COPY).unlink()
    if now == "moved":
        model = model.rename(model.with_name("elsewhere"))

    found = SourceFingerprint.of(model, memory=memory)
    assert found.fingerprint == begun == digest_of(found.files)
    assert WorkDir.of(memory.parent, found).root == made


def test_record_from_when_second_copies_counted_names_the_same_source(
    model: Path, memory: Path
) -> None:
    save_file({"a": torch.ones(8)}, model / SECOND_COPY)
    recorded = older(model, memory.with_name("other.json"))
    found = SourceFingerprint.of(model, memory=memory)

    assert found.is_named(recorded, model, memory=memory)
    assert found.is_named(found.fingerprint, model, memory=memory)
    (model / SECOND_COPY).write_bytes(b"other")
    assert not found.is_named(recorded, model, memory=memory)


def test_digests_have_their_documented_name() -> None:
    page = Path(__file__).parents[4] / "docs" / "concepts" / "checkpoints.md"

    assert f" {DIGESTS_FILE} " in page.read_text()


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "added_tokens.json",
        "special_tokens_map.json",
        "generation_config.json",
        "tekken.json",
    ],
)
def test_fingerprint_covers_config_and_tokenizer(name: str, model: Path, memory: Path) -> None:
    if name == "tekken.json":  # which counts alone
        (model / "tokenizer.json").unlink()
    before = fingerprint(model, memory)

    (model / name).write_text('{"other": 1}')

    assert fingerprint(model, memory) != before


def test_fingerprint_covers_which_file_holds_what(model: Path, memory: Path) -> None:
    before = fingerprint(model, memory)

    (model / "model.safetensors").rename(model / "other.safetensors")

    assert fingerprint(model, memory) != before


def test_fingerprint_ignores_readme_place_and_time(model: Path, memory: Path) -> None:
    before = fingerprint(model, memory)

    (model / "README.md").write_text("text")
    os.utime(model / "config.json", (0, 0))
    moved = model.rename(model.with_name("elsewhere"))

    assert fingerprint(moved, memory) == before


def test_untouched_files_are_not_read_again(
    model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counting(path: Path) -> str:
        read.append(path.name)
        return digest(path)

    monkeypatch.setattr(source_module, "digest", counting)
    before = fingerprint(model, memory)
    first, read[:] = list(read), []
    (model / "tokenizer.json").write_text("[]")

    changed = fingerprint(model, memory)

    assert sorted(first) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert read == ["tokenizer.json"]
    assert changed != before


def test_file_replaced_while_it_is_hashed_is_hashed_again(
    model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replaced = model / "model.safetensors", []

    def meanwhile(read: Path) -> str:
        found = digest(read)
        if read == path and not replaced:  # a download that ends after it was read
            replaced.append(save_file({"a": torch.ones(8)}, path))
        return found

    monkeypatch.setattr(source_module, "digest", meanwhile)
    found = fingerprint(model, memory)

    assert found == fingerprint(model, memory.with_name("other.json"))
    assert json.loads(memory.read_text())[str(path)]["sha256"] == digest(path)


def test_file_that_keeps_changing_is_named(
    model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(read: Path) -> str:
        found = digest(read)
        with read.open("ab") as file:
            file.write(b"more")
        return found

    monkeypatch.setattr(source_module, "digest", growing)

    with pytest.raises(SourceModelError, match=r"model\.safetensors` changes while it is read"):
        fingerprint(model, memory)
    assert not memory.exists()


def test_processes_that_digest_at_once_remember_all(tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    paths = [tmp_path / f"file-{number}" for number in range(24)]
    for path in paths:
        path.write_text(path.name)

    with ThreadPoolExecutor(4) as pool:  # a lock file is opened anew each time, as by processes
        list(pool.map(lambda part: source_module.digests(paths[part::4], memory), range(4)))

    assert json.loads(memory.read_text()).keys() == {*map(str, paths), "checksum"}


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', '{"x": {"size": "much"}}'])
def test_unreadable_memory_only_costs_time(content: str, model: Path, memory: Path) -> None:
    before = fingerprint(model, memory)

    memory.write_text(content)

    assert fingerprint(model, memory) == before
    assert str((model / "config.json").resolve()) in json.loads(memory.read_text())


@pytest.mark.parametrize("what", ["sha256", "mtime_ns", "checksum"])
def test_one_altered_digit_in_the_memory_is_noticed(what: str, model: Path, memory: Path) -> None:
    before = fingerprint(model, memory)
    content = json.loads(memory.read_text())
    entry = content if what == "checksum" else content[str((model / "config.json").resolve())]
    digit = str(entry[what])[-1]
    entry[what] = type(entry[what])(f"{str(entry[what])[:-1]}{(int(digit, 16) + 1) % 10}")
    memory.write_text(json.dumps(content))

    assert fingerprint(model, memory) == before
    assert json.loads(memory.read_text()) != content


def test_files_of_one_name_in_two_folders_keep_their_own_digests(tmp_path: Path) -> None:
    paths = [tmp_path / name / "model.safetensors" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(str(path))

    found = source_module.digests(paths, tmp_path / "digests.json")

    assert found == {path: digest(path) for path in paths}


def test_memory_that_cannot_be_written_does_no_harm(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    blocked = fingerprint(model, tmp_path / "file" / "digests.json")

    assert blocked == fingerprint(model, tmp_path / "digests.json")


def test_unreadable_file_is_named(model: Path, memory: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "nowhere")

    with pytest.raises(SourceModelError, match=r"model\.safetensors"):
        fingerprint(model, memory)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `org/model` and room for a work root."""
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_mistyped_path_is_not_asked_for_on_the_hub(here: Path) -> None:
    with pytest.raises(SourceModelError, match=r"no folder `org/modle`.*`org/modle@main` for"):
        hub_model(Path("org/modle"), here / "work")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/model", None),
        ("modle", None),
        ("org/modle@main", HubModel(repo="org/modle", revision="main")),
        ("other/modle", HubModel(repo="other/modle")),
    ],
)
def test_hub_is_meant_by_a_revision_or_where_no_such_folder_begins(
    source: str, expected: HubModel | None, here: Path
) -> None:
    assert hub_model(Path(source), here / "work") == expected


def test_the_origin_of_a_fetched_folder_is_what_was_recorded(model: Path) -> None:
    assert provenance(model) is None
    record = dict.fromkeys(PROVENANCE, "x") | {"gated": False}

    provenance_file(model).write_text(json.dumps({**record, "later": 1}))
    assert provenance_file(model) == model.with_name("My Model (v1).source.json")
    assert provenance(model) == record

    for damaged in ("{", "[]", json.dumps({"repo": "x"})):
        provenance_file(model).write_text(damaged)
        assert provenance(model) is None
