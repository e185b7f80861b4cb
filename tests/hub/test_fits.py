"""`exl2flow fits` on a repository: the same rows as of its folders, and no weights are fetched."""

import json
from pathlib import Path

import pytest
from hub_fixtures import shards, weights_served
from hub_server import Hub, Tree, is_large
from huggingface_hub import constants
from offered import EXL2, inside, offered
from typer.testing import CliRunner, Result

from exl2flow.cli.main import app
from exl2flow.pipeline.hub.client import Hub as Client

REPO = "org/tiny-exl2"
WANTED = ("--memory", "24GB", "--context", "128", "--cache", "q6")
PLACES = ("name", "command", "size")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["fits", *words])


def rows(*words: str) -> list[dict[str, object]]:
    done = run(*words, *WANTED, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["models"]


def without_places(found: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if key not in PLACES} for row in found]


def tree_of(hub: Hub, folder: Path) -> Tree:
    return {
        path.name: hub.entry(path.read_bytes(), is_lfs=is_large(path.name))
        for path in folder.iterdir()
        if path.is_file()
    }


def received(hub: Hub) -> int:
    """Return the bytes that headers of shards have, twice where two requests ask for them."""
    headers = (path.read_bytes()[:8] for path in shards(hub, REPO).values())
    return sum(8 + int.from_bytes(length, "little") for length in headers)


@pytest.fixture(params=["branches", "folders"])
def bitrates(request: pytest.FixtureRequest, hub: Hub, converted: list[Path]) -> Hub:
    """The converted models, on a branch or in a folder each, beside a branch without any."""
    hub.create(REPO)
    if request.param == "branches":
        for folder in converted:
            hub.commit(REPO, folder.name, tree_of(hub, folder))
    else:
        trees = [inside(folder.name, tree_of(hub, folder)) for folder in converted]
        hub.commit(REPO, "main", trees[0] | trees[1])
    return hub


def test_bitrates_of_a_repository_are_those_of_their_folders(
    bitrates: Hub, converted: list[Path]
) -> None:
    found = rows(REPO)

    local = [row for folder in reversed(converted) for row in rows(str(folder))]
    bits = [row["bits"] for row in found]
    assert bits == [6.0, 3.0]
    assert without_places(found) == without_places(local)
    assert [row["name"] for row in found] == [f"{REPO}:6.0", f"{REPO}:3.0"]
    command = f"exl2flow chat {REPO}:6.0 --cache q6 --max-tokens 128"
    assert found[0]["command"] == command


def test_only_configs_and_headers_are_fetched(bitrates: Hub) -> None:
    rows(REPO)

    assert weights_served(bitrates, REPO) == 0
    parts = [r.headers["range"] for r in bitrates.asked("GET /objects/")]
    asked = [range(*map(int, part.removeprefix("bytes=").split("-"))) for part in parts]
    assert sum(len(each) + 1 for each in asked) == received(bitrates)
    files = {r.path.rpartition("/")[2] for r in bitrates.asked("GET /org/.*/resolve/")}
    assert files == {"config.json", "model.safetensors"}
    snapshots = [p for p in Path(constants.HF_HUB_CACHE).rglob("snapshots/**/*") if p.is_file()]
    assert {path.name for path in snapshots} == {"config.json"}


def test_a_choice_and_a_revision_choose_rows(bitrates: Hub, converted: list[Path]) -> None:
    assert [row["name"] for row in rows(f"{REPO}:3.0")] == [f"{REPO}:3.0"]
    done = run(f"{REPO}:5.0", *WANTED)

    assert done.exit_code == 1, done.output
    assert f"`{REPO}` has no EXL2 model `5.0`; it has:\n  {REPO}:6.0" in done.stderr


def test_what_conversions_of_a_repository_would_make(
    hub: Hub, tiny: str, tiny_source: Path
) -> None:
    done = run("org/tiny", *WANTED)

    assert done.exit_code == 0, done.output
    assert weights_served(hub) == 0
    lines = done.stdout.splitlines()
    assert "  exl2flow convert org/tiny --out ./tiny-4.0bpw --bpw 4.0" in lines
    fit = "  exl2flow convert org/tiny --out ./tiny-24GB --fit 24GB --context 128 --cache q6"
    assert fit in lines
    assert without_places(rows("org/tiny")) == without_places(rows(str(tiny_source)))


def test_a_revision_is_converted_by_its_name(hub: Hub, tiny: str) -> None:
    found = rows(f"org/tiny@{tiny}")

    assert found[0]["command"] == (
        f"exl2flow convert org/tiny@{tiny} --out ./tiny-8.0bpw --bpw 8.0"
    )


def test_nothing_fits_names_the_smallest_by_its_name(bitrates: Hub) -> None:
    done = run(REPO, "--memory", "1GB", "--context", "128")

    assert done.exit_code == 1, done.output
    assert f"error: nothing fits 1.00 GB: the smallest model, `{REPO}:3.0`, takes" in done.stderr
    assert "use `--memory 1.1GB`\n" in done.stderr


def test_without_the_hub_the_cache_serves(bitrates: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    here = CliRunner().invoke(app, ["inspect", f"{REPO}:3.0", "--json"])
    assert here.exit_code == 0, here.output
    [online] = rows(f"{REPO}:3.0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    [offline] = rows(REPO)

    assert without_places([offline]) == without_places([online])


def other_architecture(hub: Hub) -> str:
    config = json.dumps({"architectures": ["OtherForCausalLM"], "model_type": "other"})
    tree = offered(hub) | {"config.json": hub.entry(config.encode(), is_lfs=False)}
    hub.create("org/other")
    hub.commit("org/other", "main", tree)
    return "org/other"


def another_method(hub: Hub) -> str:
    hub.create("org/exl3")
    hub.commit("org/exl3", "4.0bpw", offered(hub, {"quant_method": "exl3", "bits": 4.0}))
    return "org/exl3"


def no_model(hub: Hub) -> str:
    hub.create("org/nothing")
    return "org/nothing"


def private(hub: Hub) -> str:
    hub.create("org/private", private=True)
    hub.tokens.clear()
    return "org/private"


def gated(hub: Hub) -> str:
    hub.create("org/gated", gated="manual")
    hub.commit("org/gated", "main", offered(hub, EXL2))
    return "org/gated"


def damaged(hub: Hub) -> str:
    hub.create("org/damaged")
    hub.commit("org/damaged", "4.0bpw", offered(hub, EXL2))
    return "org/damaged"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_architecture, "`org/other` is no EXL2 model and cannot be converted: "),
        (another_method, "`org/exl3` has no EXL2 model, but weights of another kind in `4.0bpw`"),
        (no_model, "`org/nothing` has no EXL2 model, nor any other model"),
        (lambda hub: "org/absent", "no `org/absent` on the Hub, or it is private"),
        (private, "for `org/private`: it is missing, wrong or expired"),
        (gated, "`org/gated` is gated: accept its terms at"),
        (damaged, "org/damaged:4.0"),
    ],
)
def test_what_cannot_be_answered_is_explained(hub: Hub, make: object, message: str) -> None:
    done = run(make(hub), *WANTED)  # type: ignore[operator]  # cases of two kinds

    assert done.exit_code == 1, done.output
    assert message in done.stderr
    assert "exl2flow-" not in done.stderr  # temporary folders
    assert done.stderr.count("error: ") == 1


def test_without_network_and_cache_one_line_says_so(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = run(REPO, *WANTED)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert Client.open().api.endpoint == "http://127.0.0.1:9"
    away = run(REPO, *WANTED)

    assert offline.exit_code == away.exit_code == 1
    assert f"error: `{REPO}` is not in `{constants.HF_HUB_CACHE}`, and HF_HUB_OFFLINE" in (
        offline.stderr
    )
    assert f"error: the Hub cannot be reached for `{REPO}`" in away.stderr
