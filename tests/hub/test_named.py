"""EXL2 models come from the Hub by name: one is chosen, pinned, fetched into the Hub's cache."""

import shutil
import socket
import threading
from pathlib import Path

import pytest
from hub_requests import Request
from hub_server import Fault, Hub
from huggingface_hub import constants
from offered import EXL2, inside, offered

from exl2flow.core.errors import Exl2FlowError, HubError, HubUnavailable, SourceModelError
from exl2flow.core.model_name import HubName, name_of
from exl2flow.core.runtime.progress import Tick, reporting_to
from exl2flow.pipeline.hub.client import Hub as Client
from exl2flow.pipeline.hub.named import folder_of

REPO = "org/tiny-exl2"
FIRST, SECOND = (f"output-0000{number}-of-00002.safetensors" for number in (1, 2))
NEEDED = {"config.json", "tokenizer.json", FIRST, SECOND}
BITS = {"2.5bpw": 2.5, "4.0bpw": 4.0, "6_5-h8": 6.5}


@pytest.fixture
def branches(hub: Hub) -> dict[str, str]:
    """A repository with a branch per bitrate: branch → commit."""
    hub.create(REPO, gated=False)
    return {
        branch: hub.commit(REPO, branch, offered(hub, {**EXL2, "bits": bits}, mark=branch[0]))
        for branch, bits in BITS.items()
    }


@pytest.fixture
def folders(hub: Hub) -> str:
    """A repository with a folder per bitrate, two of them with the same bits; its commit."""
    hub.create(REPO)
    tree = inside("4bpw-h6", offered(hub, EXL2)) | inside("4bpw-h8", offered(hub, EXL2, mark="8"))
    return hub.commit(REPO, "main", tree | inside("3_0bpw", offered(hub, EXL2, mark="3")))


def get(text: str) -> Path:
    name = HubName.of(text)
    assert name is not None
    return folder_of(name, Client.open(), say=said.append)


said = list[str]()


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    said.clear()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refusal(text: str, kind: type[Exl2FlowError] = SourceModelError) -> str:
    """Return why a name is refused."""
    with pytest.raises(kind) as raised:
        get(text)
    assert type(raised.value) is kind
    return str(raised.value)


def cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing listen where the Hub was."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name@4.0bpw", ("org/name", "4.0bpw", None)),
        ("org/name:4.0", ("org/name", None, "4.0")),
        ("org/name@refs/pr/3:all/4bpw", ("org/name", "refs/pr/3", "all/4bpw")),
        ("name:4.0", None),
        ("/org/name", None),
        ("a/b/c", None),
    ],
)
def test_names_are_told_from_paths(text: str, expected: object) -> None:
    name = HubName.of(text)

    assert (name and (name.repo, name.revision, name.choice)) == expected
    assert name is None or str(name) == text


def test_the_name_of_a_model_is_that_on_the_hub_or_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/here").mkdir(parents=True)

    assert name_of(Path("org/name:4.0")) == "org/name:4.0"
    assert name_of(Path("org/here")) == "here"


@pytest.mark.parametrize("choice", ["@4.0bpw", ":4.0", ":4", ":4.04", ":3.95", ":4.0bpw", ":4_0"])
def test_a_branch_is_fetched_into_the_cache_by_its_commit(
    hub: Hub, branches: dict[str, str], choice: str
) -> None:
    folder = get(f"{REPO}{choice}")

    assert folder.name == branches["4.0bpw"]
    assert folder.is_relative_to(constants.HF_HUB_CACHE)
    assert names(folder) == NEEDED
    assert (folder / FIRST).read_bytes() == b"4" * 400
    assert all(branches["4.0bpw"] in request.path for request in hub.asked("/resolve/.*tensors"))
    assert len(said) == 1
    assert f"fetching `{REPO}{choice}` (`4.0bpw` at commit {folder.name[:8]}, 1.06 kB)" in said[0]


def test_a_folder_of_a_repository_is_fetched_alone(folders: str) -> None:
    folder = get(f"{REPO}:3.0")

    assert (folder.name, folder.parent.name) == ("3_0bpw", folders)
    assert names(folder) == NEEDED
    assert (folder / SECOND).read_bytes() == b"3" * 600
    assert not list(folder.parent.glob("4bpw*/*.safetensors"))
    assert get(f"{REPO}:4bpw-h8").name == "4bpw-h8"


def test_main_needs_no_bits(hub: Hub, branches: dict[str, str]) -> None:
    commit = hub.commit(REPO, "main", offered(hub, {**EXL2, "bits": 5.0}))

    assert get(REPO).name == commit
    assert get(f"{REPO}:5").name == commit


def test_the_only_model_needs_no_bits(hub: Hub) -> None:
    hub.create(REPO)
    commit = hub.commit(REPO, "3.5bpw", offered(hub, EXL2))

    assert get(REPO).name == commit


def test_several_that_match_are_listed_with_what_to_type(hub: Hub, folders: str) -> None:
    message = refusal(f"{REPO}:4.0")

    assert message.splitlines() == [
        f"`{REPO}:4.0` may be one of 2 EXL2 models; type one of these names:",
        f"  {REPO}:4bpw-h6  4.00 bits per weight  1.05 kB  main/4bpw-h6",
        f"  {REPO}:4bpw-h8  4.00 bits per weight  1.05 kB  main/4bpw-h8",
    ]
    assert f"\n  {REPO}:3.0      3.00 bits per weight  1.05 kB  main/3_0bpw" in refusal(REPO)
    assert not hub.asked("tensors")


def test_what_is_listed_can_be_typed(hub: Hub, folders: str) -> None:
    hub.commit(REPO, "3.02bpw", offered(hub, EXL2))
    hub.commit(REPO, "4bpw-h6", offered(hub, EXL2, mark="9"))

    typed = [line.split()[0] for line in refusal(REPO).splitlines()[1:]]

    assert len(typed) == 5
    assert len({get(name) for name in typed}) == 5


def test_none_that_matches_lists_what_there_is(branches: dict[str, str]) -> None:
    message = refusal(f"{REPO}:5.0")

    assert message.splitlines() == [
        f"`{REPO}` has no EXL2 model `5.0`; it has:",
        f"  {REPO}:6.5  6.50 bits per weight  1.06 kB  6_5-h8",
        f"  {REPO}:4.0  4.00 bits per weight  1.06 kB  4.0bpw",
        f"  {REPO}:2.5  2.50 bits per weight  1.06 kB  2.5bpw",
    ]
    assert "has no EXL2 model `best`" in refusal(f"{REPO}:best")


@pytest.mark.parametrize("quantization", [None, {"quant_method": "exl3", "bits": 4.0}])
def test_a_repository_without_exl2_says_how_to_convert(hub: Hub, quantization: object) -> None:
    hub.create("org/tiny")
    hub.commit("org/tiny", "main", offered(hub, quantization))

    message = refusal("org/tiny:4.0")

    assert "`org/tiny` has no EXL2 model, but weights of another kind in `main`" in message
    assert "`exl2flow convert org/tiny --out ./tiny-4.0bpw --bpw 4.0`" in message


def test_a_repository_without_models_says_so(hub: Hub) -> None:
    hub.create("org/tiny")

    assert "`org/tiny` has no EXL2 model, nor any other model" in refusal("org/tiny")


def test_what_is_not_on_the_hub_is_named(hub: Hub, branches: dict[str, str]) -> None:
    assert "no `org/none` on the Hub, or it is private: check the name" in refusal(
        "org/none:4.0", HubError
    )
    assert f"`{REPO}` has no such revision; see {hub.url}/{REPO}/refs" in refusal(
        f"{REPO}@5.0bpw", HubError
    )


def test_a_private_repository_needs_a_token(
    hub: Hub, branches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REPO]["private"] = True
    assert get(f"{REPO}:4.0").is_dir()

    monkeypatch.delenv("HF_TOKEN")

    assert "for a private one run `hf auth login`" in refusal(f"{REPO}:4.0", HubError)


def test_a_gated_repository_says_where_to_accept_its_terms(
    hub: Hub, branches: dict[str, str]
) -> None:
    hub.repos[REPO]["gated"] = "manual"

    message = refusal(f"{REPO}:4.0", HubError)

    assert f"`{REPO}` is gated: accept its terms at {hub.url}/{REPO} with the account" in message


def test_a_disk_without_room_is_refused_before_the_download(
    hub: Hub, branches: dict[str, str]
) -> None:
    tree = hub.repos[REPO]["commits"][branches["4.0bpw"]]
    tree[FIRST] = {**tree[FIRST], "size": 10**18}  # as the Hub says it, in listings
    free = shutil.disk_usage(hub.root).free

    message = refusal(f"{REPO}:4.0", HubError)

    assert f"`{REPO}:4.0` takes 1000000000.00 GB (1,000,000,000,000,0" in message
    assert f"in `{constants.HF_HUB_CACHE}`, whose disk has {free / 1e9:.0f}"[:-2] in message
    assert "set HF_HOME to a folder on a larger disk" in message
    assert not hub.asked("tensors")


def test_a_branch_that_moves_during_the_download_mixes_nothing(
    hub: Hub, branches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, usual, turn = list[str](), hub.fault, threading.Lock()

    def moving(request: Request) -> Fault | None:
        with turn:  # shards are asked for at once
            if "/objects/" in request.path and not moved:
                tree = offered(hub, {**EXL2, "bits": 4.0}, mark="n")
                moved.append(hub.commit(REPO, "4.0bpw", tree))
        return usual(request)

    monkeypatch.setattr(hub, "fault", moving)

    folder = get(f"{REPO}:4.0")

    assert moved
    assert (folder / FIRST).read_bytes() + (folder / SECOND).read_bytes() == b"4" * 1000
    assert folder.name == branches["4.0bpw"]
    assert get(f"{REPO}:4.0").name == moved[0]


def test_a_second_time_nothing_is_fetched(hub: Hub, branches: dict[str, str]) -> None:
    first = get(f"{REPO}:4.0")
    before = len(hub.asked("/resolve/|/objects/"))

    assert get(f"{REPO}:4.0") == first
    assert len(hub.asked("/resolve/|/objects/")) == before
    assert len(said) == 1


def test_progress_reaches_the_whole_size(branches: dict[str, str]) -> None:
    ticks = list[Tick]()

    with reporting_to(ticks.append):
        get(f"{REPO}:4.0")

    assert (ticks[-1].stage, ticks[-1].done) == ("fetch", ticks[-1].total)


def test_an_interrupted_download_keeps_finished_files(hub: Hub, branches: dict[str, str]) -> None:
    tree = hub.repos[REPO]["commits"][branches["4.0bpw"]]
    first, second = (f"GET /objects/{tree[name]['sha256']}" for name in (FIRST, SECOND))
    hub.fail(second, "status", times=None, status=404)
    assert "404" in refusal(f"{REPO}:4.0", HubError)
    hub.faults.clear()
    assert len(hub.asked(first)) == 1

    folder = get(f"{REPO}:4.0")

    assert names(folder) == NEEDED
    assert len(hub.asked(first)) == 1
    assert len(hub.asked(second)) == 2


def test_a_connection_that_is_cut_goes_on_within_the_file(
    hub: Hub, branches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    tree = hub.repos[REPO]["commits"][branches["4.0bpw"]]
    where = f"GET /objects/{tree[FIRST]['sha256']}"
    hub.fail(where, "cut", after=200)

    folder = get(f"{REPO}:4.0")

    assert (folder / FIRST).read_bytes() == b"4" * 400
    assert "bytes=200-" in [request.headers.get("range") for request in hub.asked(where)]


def test_bytes_that_differ_from_the_digest_are_fetched_again(
    hub: Hub, branches: dict[str, str]
) -> None:
    path = hub.path_of(hub.repos[REPO]["commits"][branches["4.0bpw"]][FIRST]["sha256"])
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + b"?")

    message = refusal(f"{REPO}:4.0", HubUnavailable)
    path.write_bytes(sound)

    assert f"`{FIRST}` of `{REPO}` arrived with sha256" in message
    assert (get(f"{REPO}:4.0") / FIRST).read_bytes() == sound


@pytest.mark.parametrize("name", [":4.0", "@4.0bpw", "", "@{commit}"])
@pytest.mark.parametrize("by_variable", [True, False])
def test_without_a_network_the_cache_serves(
    hub: Hub,
    branches: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    by_variable: bool,
) -> None:
    name = REPO + name.format(commit=branches["4.0bpw"])
    folder = get(f"{REPO}:4.0")
    said.clear()
    if by_variable:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        cut_off(hub, monkeypatch)
    hub.requests.clear()

    assert get(name) == folder
    assert not hub.requests
    why = "HF_HUB_OFFLINE is set" if by_variable else "the Hub cannot be reached"
    assert said[0].startswith(why)
    assert said[0].endswith(f"; using what `{constants.HF_HUB_CACHE}` has of `{REPO}`")


def test_without_a_network_other_models_are_not_there(
    hub: Hub, branches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get(f"{REPO}:4.0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert refusal(f"{REPO}:6.5").splitlines() == [
        f"`{REPO}` has no EXL2 model `6.5`; without the Hub, the cache has:",
        f"  {REPO}:4.0  4.00 bits per weight  1.06 kB  4.0bpw",
    ]
    assert (
        f"`org/other` is not in `{constants.HF_HUB_CACHE}`, and HF_HUB_OFFLINE is set; unset it"
    ) in refusal("org/other", HubError)


@pytest.mark.parametrize("missing", ["tokenizer.json", SECOND])
@pytest.mark.parametrize("keeps_listing", [True, False])
def test_without_a_network_a_part_of_a_model_is_none(
    hub: Hub,
    branches: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    keeps_listing: bool,
) -> None:
    if missing != SECOND and not keeps_listing:
        pytest.skip("nothing tells what else there was")
    folder = get(f"{REPO}:4.0")
    (folder / missing).unlink()
    if not keeps_listing:
        shutil.rmtree(folder.parents[1] / "trees", ignore_errors=True)
    cut_off(hub, monkeypatch)

    assert "the Hub cannot be reached" in refusal(f"{REPO}:4.0", HubUnavailable)


def test_without_a_network_a_folder_of_a_repository_is_found(
    hub: Hub, folders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = get(f"{REPO}:4bpw-h8")
    hub.fail(f"(GET|HEAD) .*/3_0bpw/{SECOND}", "status", times=None, status=404)
    refusal(f"{REPO}:3.0", HubError)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert get(f"{REPO}:4.0") == folder
    assert "has no EXL2 model `3.0`" in refusal(f"{REPO}:3.0")
