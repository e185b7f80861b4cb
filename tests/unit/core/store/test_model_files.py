"""Which files belong to a model, and which links are followed."""

import json
from pathlib import Path

import pytest
from sources import FILES, ROOT

from exl2flow.core.errors import SourceModelError
from exl2flow.core.store.model_files import (
    carried_files,
    check_links,
    has_only_tekken,
    is_carried,
    is_of_model,
    is_weights,
    left_out,
    public_content,
    second_copies,
    weight_files,
    weights_size,
)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "spiece.model",
        "sentencepiece.bpe.model",
        "chat_template.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "chat_template.jinja",
        "README.md",
        "generation_config.json",
        "preprocessor_config.json",
        "LICENSE",
        "LICENSE.txt",
        "LICENSE-MODEL.md",
        "licence",
        "NOTICE",
        "USE_POLICY.md",
    ],
)
def test_tokenizer_configs_and_terms_go_along(name: str) -> None:
    assert is_carried(name)


@pytest.mark.parametrize(
    "name",
    [
        "wandb-key.txt",
        "train_private.csv",
        "tf_model.h5",
        "flax_model.msgpack",
        ".env",
        "pytorch_model.bin",
        "trainer_state.json",
        "optimizer.pt",
        "modeling_mine.py",
        "a.gguf",
        "LICENSE.key",
        "license.json",
        "consolidated.safetensors",
        "pytorch_model.bin.index.json",
        "original/tokenizer.model",
        "onnx/config.json",
        "checkpoint-500/model.safetensors",
        "checkpoint-500/model.safetensors.index.json",
        "original/model.safetensors",
    ],
)
def test_anything_else_belongs_to_no_model(name: str) -> None:
    assert not is_of_model(name)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
)
def test_weights_at_the_top_and_their_index_belong_to_a_model(name: str) -> None:
    assert is_weights(name)
    assert is_of_model(name)


@pytest.mark.parametrize(
    "name",
    [
        "measurement.safetensors",
        "consolidated.safetensors",
        "consolidated.safetensors.index.json",
        "original/model.safetensors",
        "config.json",
    ],
)
def test_measurements_and_second_copies_are_no_weights(name: str) -> None:
    assert not is_weights(name)


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["b.safetensors", "a.safetensors", "config.json"], ["a.safetensors", "b.safetensors"]),
        (["consolidated.00.safetensors"], ["consolidated.00.safetensors"]),
        (["measurement.safetensors"], []),
        (["model.safetensors", "model.safetensors.index.json"], ["model.safetensors"]),
        ([], []),
    ],
)
def test_weight_files_are_those_that_a_loader_reads(
    names: list[str], weights: list[str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"123")

    assert [path.name for path in weight_files(tmp_path)] == weights
    assert weights_size(tmp_path) == 3 * len(weights)
    rest = {name for name in names if name.startswith("consolidated")} - {*weights}
    assert {path.name for path in second_copies(tmp_path)} == rest


def test_nobody_else_looks_for_weights_by_a_pattern() -> None:
    files = {ROOT / file for file in FILES if not file.startswith("calibration_data/")}

    assert [path for path in files if '.glob("*.safetensors' in path.read_text()] == []


@pytest.mark.parametrize(
    ("names", "is_only"),
    [
        (["tekken.json"], True),
        (["tekken.json", "config.json"], True),
        (["tekken.json", "tokenizer.json"], False),
        (["tekken.json", "tokenizer.model"], False),
        (["tokenizer.json"], False),
        ([], False),
    ],
)
def test_tekken_counts_where_there_is_no_other_tokenizer(
    names: list[str], is_only: bool, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")

    assert has_only_tekken(tmp_path) is is_only


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "notes.txt", ".netrc"):
        (folder / name).write_text("{}")
    return folder


def test_files_are_carried_or_named_as_left_out(model: Path) -> None:
    (model / "checkpoint-7").mkdir()

    assert carried_files(model) == [model / "tokenizer.json"]
    assert left_out(model) == ["notes.txt"]


def test_a_folder_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert carried_files(tmp_path / "none") == left_out(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["LICENSE.txt", "config.json"])
@pytest.mark.parametrize(
    "target", ["../home/token", "notes.txt", ".netrc", "checkpoint-7/config.json"]
)
def test_link_to_anything_but_a_file_of_the_model_is_refused_by_name(
    model: Path, name: str, target: str
) -> None:
    for path in (model / "../home/token", model / "checkpoint-7/config.json"):
        path.resolve().parent.mkdir()
        path.write_text("hf_secret")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target)

    with pytest.raises(SourceModelError) as raised:
        carried_files(model)

    assert f"`{model / name}` is a link to `{(model / target).resolve()}`" in str(raised.value)


def test_link_to_another_file_of_the_model_is_followed(model: Path) -> None:
    (model / "LICENSE").write_text("MIT")
    (model / "LICENSE.md").symlink_to("LICENSE")

    assert model / "LICENSE.md" in carried_files(model)


def test_snapshot_of_a_hub_cache_is_taken_but_not_what_only_looks_like_it(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--tiny"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "1f3").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1f3")
    (tmp_path / "linked").symlink_to(snapshot)

    assert [path.name for path in carried_files(tmp_path / "linked")] == ["tokenizer.json"]
    (cache / "token").write_text("hf_secret")
    (snapshot / "LICENSE").symlink_to("../../token")
    with pytest.raises(SourceModelError, match="LICENSE"):
        carried_files(snapshot)


def test_link_from_a_folder_of_its_own_to_a_blob_of_a_hub_cache_is_followed(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--org--name"
    for name in ("blobs", "snapshots"):
        (cache / name).mkdir(parents=True)
    (cache / "blobs" / "1f3").write_text("{}")
    (model / "tokenizer.json").unlink(missing_ok=True)
    (model / "tokenizer.json").symlink_to(cache / "blobs" / "1f3")

    assert "tokenizer.json" in [path.name for path in carried_files(model)]


def test_every_bad_link_is_named(model: Path) -> None:
    for name in ("LICENSE", "NOTICE"):
        (model / name).symlink_to("notes.txt")

    with pytest.raises(SourceModelError) as raised:
        check_links([model / "LICENSE", model / "NOTICE"])

    assert len(str(raised.value).splitlines()) == 2


def test_configs_lose_the_folders_they_were_made_in(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    kept = {
        "tokenizer_class": "T",
        "vocab_file": "vocab.json",
        "unk_token": "/",
        "a": [1e-5],
        "b_dir": 1,
    }
    private = {
        "name_or_path": "clients/acme/ckpt-1200",
        "tokenizer_file": "/home/alice/.cache/tokenizer.json",
        "adapter_path": "~/acme/adapter",
        "cache_dir": "C:\\Users\\alice",
        "share_dir": "\\\\server\\acme",
        "text_config": {"_name_or_path": "/home/alice/acme", "b": 1},
    }
    path.write_text(json.dumps({**kept, **private}))

    content = public_content(path)

    assert content is not None
    assert json.loads(content) == {**kept, "text_config": {"b": 1}}
    assert content.endswith(b"}\n")


@pytest.mark.parametrize("text", ['{"a" :1}', "broken", "[]"])
def test_other_configs_keep_their_bytes(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    assert public_content(tmp_path / "config.json") is None


@pytest.mark.parametrize("name", ["vocab.json", "README.md"])
def test_only_configs_are_read_for_private_paths(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"name_or_path": "a"}')

    assert public_content(tmp_path / name) is None


def test_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()

    with pytest.raises(SourceModelError, match=r"cannot read `.*config\.json`: Is a directory"):
        public_content(tmp_path / "config.json")
