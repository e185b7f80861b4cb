"""Listings and configs tell what a repository offers, by the habits of EXL2 repositories."""

import pytest
from hub_server import Hub
from offered import EXL2, inside, offered

from exl2flow.core.errors import HubError
from exl2flow.pipeline.hub.client import Hub as Client
from exl2flow.pipeline.hub.variants import Variant, bits_of, variants

REPO = "org/tiny-exl2"


def found(repo: str = REPO, revision: str | None = None) -> list[Variant]:
    return variants(Client.open(), repo, revision)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("4.0bpw", 4.0),
        ("4_0bpw", 4.0),
        ("4bpw-h6", 4.0),
        ("6.5bpw-h8", 6.5),
        ("h8-4.25bpw", 4.25),
        ("4_25", 4.25),
        ("4.0", 4.0),
        ("4.0-h6", 4.0),
        ("Llama-3.2-1B-3.75bpw-h6-exl2", 3.75),
        ("Llama-3_2_4_0bpw", 4.0),
        ("main", None),
        ("v1.0", None),
        ("2024", None),
        ("0.5", None),
        ("Llama-2-7B", None),
    ],
)
def test_names_tell_bits(name: str, bits: float | None) -> None:
    assert bits_of(name) == bits


def test_a_branch_per_bitrate(hub: Hub) -> None:
    hub.create(REPO)
    low = hub.commit(REPO, "3.0bpw", offered(hub, {**EXL2, "bits": 3.0}, weights=300))
    high = hub.commit(REPO, "6_5-h8", offered(hub, EXL2, weights=650))

    first, second = found()

    assert (first.revision, first.commit, first.folder) == ("6_5-h8", high, "")
    assert (first.bits, first.is_exl2) == (6.5, True)
    assert (second.revision, second.commit, second.bits) == ("3.0bpw", low, 3.0)
    assert second.size == 300 + sum(file.size for file in second.files if file.lfs is None)
    assert {file.path for file in second.files} == {
        "config.json",
        "tokenizer.json",
        "output-00001-of-00002.safetensors",
        "output-00002-of-00002.safetensors",
    }
    assert not hub.asked("safetensors")


def test_a_folder_per_bitrate(hub: Hub) -> None:
    hub.create(REPO)
    tree = inside("4bpw-h6", offered(hub, EXL2)) | inside("all/8_0", offered(hub, EXL2))
    commit = hub.commit(REPO, "main", tree | {"README.md": hub.entry(b"#", is_lfs=False)})

    assert [(one.folder, one.bits, one.revision, one.commit) for one in found()] == [
        ("all/8_0", 8.0, "main", commit),
        ("4bpw-h6", 4.0, "main", commit),
    ]


@pytest.mark.parametrize(
    ("repo", "quantization", "expected"),
    [
        ("org/tiny", {**EXL2, "bits": 4.25}, (True, 4.25)),
        ("org/tiny-4.0bpw-h6", EXL2, (True, 4.0)),
        ("org/tiny-4.0bpw-h6", None, (True, 4.0)),  # exllamav2 once wrote nothing
        ("org/tiny", None, (False, None)),
        ("org/tiny", {"quant_method": "gptq", "bits": 4}, (False, 4.0)),
        ("org/tiny-4.0bpw", {"quant_method": "exl3", "bits": 4.0}, (False, 4.0)),
        ("org/tiny", {**EXL2, "bits": "many"}, (True, None)),
        ("org/tiny", ["odd"], (False, None)),
    ],
)
def test_main_alone_is_told_by_its_config_and_the_name_of_the_repository(
    hub: Hub, repo: str, quantization: object, expected: tuple[bool, float | None]
) -> None:
    hub.create(repo)
    hub.commit(repo, "main", offered(hub, quantization))

    [only] = found(repo)

    assert (only.is_exl2, only.bits) == expected


def test_a_commit_of_several_branches_counts_once(hub: Hub) -> None:
    hub.create(REPO)
    tree = offered(hub, EXL2)
    for branch in ("old", "4.0bpw"):
        hub.commit(REPO, branch, tree)
    hub.repos[REPO]["branches"]["main"] = hub.head(REPO, "4.0bpw")
    hub.repos[REPO]["branches"]["old"] = hub.head(REPO, "4.0bpw")

    assert [one.revision for one in found()] == ["4.0bpw"]


def test_one_revision_is_looked_at_alone(hub: Hub) -> None:
    hub.create(REPO)
    commit = hub.commit(REPO, "3.0bpw", offered(hub, EXL2))
    hub.commit(REPO, "4.0bpw", offered(hub, EXL2, weights=2))

    assert [one.bits for one in found(revision="3.0bpw")] == [3.0]
    [by_commit] = found(revision=commit)
    assert by_commit.commit == commit
    with pytest.raises(HubError, match="no such revision"):
        found(revision="5.0bpw")


def test_what_lacks_weights_or_a_config_is_no_offered(hub: Hub) -> None:
    hub.create(REPO)
    tree = offered(hub, EXL2)
    del tree["config.json"]
    hub.commit(REPO, "main", tree | {"measurement.json": hub.entry(b"{}", is_lfs=False)})

    assert found() == []
    with pytest.raises(HubError, match="no `org/none` on the Hub"):
        found("org/none")
