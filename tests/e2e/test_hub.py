"""From a name on the Hub to published branches: by the program, by flows with a Secret block."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conversions import QUICK, small_config
from hub_fixtures import add_file, converted, hub, models, tiny_source
from hub_server import TOKEN, Hub
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect_runs import artifacts, log_lines, run_name, task_states
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import HubError
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.store.stage import RECORD_FILE
from exl2flow.flows import convert, publish, validate
from exl2flow.flows.validate import Comparison

__all__ = ["converted", "hub", "models", "tiny_source"]

REPO = "org/tiny-exl2"
BLOCK = "hub-token"


def program(hub: Hub, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a client of a Hub."""
    return subprocess.run(
        [sys.executable, "-m", "exl2flow.flows.cli", *map(str, arguments)],
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(hub.root / "home"),
            "OMP_NUM_THREADS": "1",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_program_converts_and_publishes_what_is_on_the_hub(
    hub: Hub, tiny_source: Path, tmp_path: Path
) -> None:
    commit = hub.add_folder("org/tiny", tiny_source, card={"license": "mit"})
    out = tmp_path / "by-program"

    made = program(
        hub, "convert", "org/tiny@main", "--out", out, "--bpw", 3, *QUICK, "--no-prefect"
    )
    words = ["publish", out, "--repo", REPO, "--device", "cpu", "--json"]
    published = CliRunner().invoke(app, [str(word) for word in words])  # a client of the Hub, too

    assert (made.returncode, published.exit_code) == (0, 0), made.stderr + published.stderr
    assert TOKEN not in made.stdout + made.stderr + published.stdout + published.stderr
    assert f"`org/tiny@main` is commit {commit}" in made.stderr
    whole = [r for r in hub.asked("GET /objects/") if "range" not in r.headers]
    assert len(whole) == 2 + 1  # two shards, then what was published
    record = json.loads((out / RECORD_FILE).read_text())
    assert record["provenance"]["repo"] == "org/tiny"
    assert record["provenance"]["commit"] == commit
    assert set(json.loads(published.stdout)["branches"]) == {"3.0bpw", "main"}
    assert not hub.repos[REPO]["private"]


@pytest.mark.slow
def test_the_program_explains_what_the_hub_refuses(hub: Hub, tmp_path: Path) -> None:
    missing = program(hub, "convert", "org/none", "--out", tmp_path / "out", *QUICK, "--no-prefect")
    expired = program(hub, "convert", "org/none", "--out", tmp_path / "out", HF_TOKEN="hf_old")
    wrong = program(hub, "publish", tmp_path, "--repo", "no-organization")

    assert (missing.returncode, expired.returncode, wrong.returncode) == (1, 1, 2)
    assert "error: no `org/none` on the Hub, or it is private" in missing.stderr
    assert "error: the Hub does not accept the token for `org/none`" in expired.stderr
    assert "`--repo` is no-organization" in wrong.stderr
    assert "Traceback" not in missing.stderr + expired.stderr + wrong.stderr


@pytest.fixture
def block(prefect_env: Mapping[str, str], hub: Hub, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Secret block with the token, which is nowhere else."""
    monkeypatch.delenv("HF_TOKEN")
    Secret(value=TOKEN).save(BLOCK, overwrite=True)
    return BLOCK


def everything_that_is_known(*runs: Any) -> str:
    """Return all that Prefect's API tells of flow runs: states, parameters, tasks, logs, pages."""
    texts = []
    with get_client(sync_client=True) as client:
        for run in runs:
            texts.append(client.read_flow_run(run).model_dump_json())
            texts += [str(log.message) for log in log_lines(run)]
            texts += [str(found.model_dump()) for found in artifacts(run).values()]
        texts += [task.model_dump_json() for task in client.read_task_runs(limit=200)]
        texts += [
            str(document.model_dump())
            for document in client.read_block_documents(include_secrets=False)
        ]
    return "\n".join(texts)


@pytest.mark.slow
def test_flows_read_the_token_from_a_block_and_leave_it_nowhere(
    hub: Hub,
    block: str,
    prefect_env: Mapping[str, str],
    tiny_source: Path,
    models: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.add_folder("org/tiny", tiny_source, card={"license": "mit"}, private=True)
    config = small_config(Path("org/tiny"), tmp_path / "4bpw", bpw=4.0, token_block=block)
    made = convert(config, return_state=True)
    target = PublishConfig(models=(*models,), repo=REPO, device="cpu", token_block=block)
    sent = publish(target, return_state=True)
    compared = Comparison(
        models=(models[0],),
        reference=Path("org/tiny"),
        device="cpu",
        token_block=block,
        options=config.validate_options,
    )
    scored = validate(compared, return_state=True)
    hub.fail("POST .*/commit/", "status", times=None, status=401)
    add_file(models[0], "NOTICE.txt", b"new")
    failed = publish(target, return_state=True)

    assert made.is_completed(), made
    assert sent.is_completed(), sent
    assert scored.is_completed(), scored
    error = failed.result(raise_on_failure=False)
    assert isinstance(error, HubError)
    assert error.__cause__ is None
    assert error.__suppress_context__
    ids = [state.state_details.flow_run_id for state in (made, sent, scored, failed)]
    assert run_name(ids[1]) == REPO
    assert task_states(ids[0])["fetch org/tiny"] == "Completed"
    assert REPO in str(artifacts(ids[1])["org-tiny-exl2-published"].data)
    said = capfd.readouterr()
    known = everything_that_is_known(*ids)
    assert REPO in known
    for text in (known, caplog.text, said.out, said.err, repr(error), str(error.__dict__)):
        assert TOKEN not in text
    assert TOKEN not in str(error.__context__)
    folders = [tmp_path, Path(prefect_env["PREFECT_HOME"])]
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_block_that_is_missing_is_a_usage_error(block: str, models: list[Path], hub: Hub) -> None:
    target = PublishConfig(models=(*models,), repo=REPO, device="cpu", token_block="no-such-block")

    state = publish(target, return_state=True)

    with pytest.raises(Exception, match="no Secret block `no-such-block`"):
        state.result()
    assert not hub.requests
