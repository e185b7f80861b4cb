"""What runs by itself, end to end: a schedule or an event, a sweep, a verified publication.

A lasting server with a worker, and a Hub of our own; nobody starts a conversion by hand.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conversions import small_config
from hub_server import TOKEN, Hub
from prefect.blocks.system import Secret
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect_runs import artifacts, log_lines, run_name, task_states
from servers import API_PAUSE_SECONDS, LastingServer, wait_for
from tiny import make_tiny

from exl2flow.core.options.sweep import SWEEP_FILE

DEMO = Path(__file__).parents[2] / "demo" / "model"
BLOCK = "hub-token"
SMALL_FIELDS = ("device", "quality", "calibration", "validate_options")
ON_MAIN = {".gitattributes", "README.md", "measurement.json"}
PAGE_ROWS = 200  # of the API's lists


@pytest.fixture
def hub(server_hub: Hub) -> Hub:
    return server_hub


@pytest.fixture(autouse=True)
def token(server: LastingServer) -> None:
    """Put the token into a Secret block, and nowhere else."""
    Secret(value=TOKEN).save(BLOCK, overwrite=True)


def publishing(repo: str, **values: object) -> dict[str, object]:
    return {"repo": repo, "max_kl": 100, "token_block": BLOCK, **values}


def small(**values: object) -> dict[str, Any]:
    """Return the parameters that make for little work."""
    config = small_config(Path("source"), Path("out")).model_dump(mode="json")
    return {**{name: config[name] for name in SMALL_FIELDS}, "rounding": {"rounds": 0}, **values}


def runs_of(server: LastingServer, words: str) -> list[FlowRun]:
    """Return the runs that have begun and whose parameters contain these words."""
    with server.client() as client:
        found = client.read_flow_runs(limit=PAGE_ROWS)
    return [run for run in found if run.run_count and words in json.dumps(run.parameters)]


def assert_published(hub: Hub, repo: str, bitrates: set[str]) -> None:
    """Assert that a repository is public and whole, and that its models were downloaded again."""
    assert not hub.repos[repo]["private"]
    assert set(hub.repos[repo]["branches"]) == bitrates | {"main"}
    assert set(hub.files(repo)) == ON_MAIN
    assert "exl2flow" in json.loads(hub.files(repo)["measurement.json"])
    for name in bitrates:
        assert f"| [{name}]" in hub.files(repo)["README.md"].decode()
        sha256 = hub.repos[repo]["commits"][hub.head(repo, name)]["model.safetensors"]["sha256"]
        assert hub.asked(f"GET /objects/{sha256}")


def assert_token_is_unseen(server: LastingServer, hub: Hub) -> None:
    """Assert that neither Prefect's API nor a file tells the token, nor the storage has met it."""
    with server.client() as client:
        runs = client.read_flow_runs(limit=PAGE_ROWS)
        texts = [run.model_dump_json() for run in runs]
        texts += [task.model_dump_json() for task in client.read_task_runs(limit=PAGE_ROWS)]
        texts += [str(found.model_dump()) for found in client.read_deployments()]
        texts += [str(found.model_dump()) for found in client.read_automations()]
        texts += [
            str(document.model_dump())
            for document in client.read_block_documents(include_secrets=False)
        ]
        texts.append(client.request("POST", "/events/filter", json={}).text)
    for run in (run for run in runs if run.run_count):
        texts += [str(log.message) for log in log_lines(run.id)]
        texts += [str(found.model_dump()) for found in artifacts(run.id).values()]
    assert BLOCK in "".join(texts)
    assert not [text for text in texts if TOKEN in text]
    files = [p for root in (server.home, server.folder, hub.root) for p in root.rglob("*")]
    assert not [path for path in files if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert {r.token for r in hub.requests if r.server == "storage"} == {None}
    assert TOKEN in {r.token for r in hub.requests if r.server == "hub"}


@pytest.mark.slow
def test_scheduled_sweep_of_the_demo_model_runs_by_itself_and_is_published(
    server: LastingServer, hub: Hub
) -> None:
    hub.create("org/demo", card={"license": "mit"})
    to = publishing("org/demo-exl2", base_model="org/demo")
    config = small(source=str(DEMO), out="demo-exl2", bpw=[3, 6], publish=to)
    every = IntervalSchedule(interval=timedelta(seconds=20), anchor_date=datetime.now(UTC))
    with server.schedule("sweep/sweep", every, config):
        wait_for(lambda: runs_of(server, "org/demo-exl2"), pause=API_PAUSE_SECONDS)

    [run] = runs_of(server, "org/demo-exl2")
    assert run.auto_scheduled
    assert server.wait(run.id) == "Completed"
    assert_published(hub, "org/demo-exl2", {"3.0bpw", "6.0bpw"})
    page = str(artifacts(run.id)["org-demo-exl2-published"].data)
    assert f"{hub.url}/org/demo-exl2/tree/6.0bpw" in str(artifacts(run.id)["model-comparison"].data)
    assert f"[6.0bpw]({hub.url}/org/demo-exl2/tree/6.0bpw)" in page
    content = json.loads((server.folder / "demo-exl2" / SWEEP_FILE).read_bytes())
    assert content["published"]["branches"]["6.0bpw"] == hub.head("org/demo-exl2", "6.0bpw")
    assert f'href="{hub.url}/org/demo-exl2"' in (
        server.folder / "demo-exl2" / "report.html"
    ).read_text(encoding="utf-8")
    assert_token_is_unseen(server, hub)


@pytest.mark.slow
def test_new_revision_on_the_hub_is_found_swept_and_published(
    server: LastingServer, hub: Hub, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path / "tiny")
    commit = hub.add_folder("someone/tiny", folder, card={"license": "mit"})

    repo = "org/{{ event.payload.repo_id.split('/')[1] }}-by-event-exl2"
    with server.trigger(**small(bpw=[3, 6], publish=publishing(repo))):
        server.submit("watch/watch", {"repositories": ["someone/tiny"], "include_existing": True})
        wait_for(lambda: runs_of(server, "org/tiny-by-event-exl2"), pause=API_PAUSE_SECONDS)

    [run] = runs_of(server, "org/tiny-by-event-exl2")
    assert server.wait(run.id) == "Completed"
    states = task_states(run.id)
    assert f"fetch someone/tiny@{commit}" in states
    assert set(states.values()) == {"Completed"}
    assert run_name(run.id).startswith(f"tiny@{commit[:7]}")
    assert server.is_healthy()
    assert_published(hub, "org/tiny-by-event-exl2", {"3.0bpw", "6.0bpw"})
    card = hub.files("org/tiny-by-event-exl2")["README.md"].decode()
    assert 'base_model: "someone/tiny"' in card
    assert commit in card
    assert_token_is_unseen(server, hub)


@pytest.mark.slow
def test_upload_damaged_on_the_way_never_becomes_public_and_loses_no_conversion(
    server: LastingServer, hub: Hub, tmp_path: Path
) -> None:
    source = make_tiny("llama", tmp_path / "another", seed=1)
    hub.add_folder("someone/another", source, card={"license": "mit"})
    to = publishing("org/damaged-exl2")
    hub.fail("PUT /uploads/", "damage")

    run = server.submit(
        "convert/convert", small(source="someone/another", out="damaged", bpw=4, publish=to)
    )

    assert server.wait(run) == "Failed"
    assert "stays private" in state_message(server, run)
    assert hub.repos["org/damaged-exl2"]["private"]
    assert not hub.asked("PUT /api/models/org/damaged-exl2/settings")
    assert task_states(run)["validate"] == "Completed"
    assert (server.folder / "damaged" / "model.safetensors").is_file()
    assert_token_is_unseen(server, hub)


def state_message(server: LastingServer, run: UUID) -> str:
    with server.client() as client:
        state = client.read_flow_run(run).state
    return str(state and state.message)
