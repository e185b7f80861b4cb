"""A lasting server with real workers: what it runs, what starts runs, what survives kills."""

import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conversions import FileIdentity, small_config, snapshot
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from servers import LastingServer, long_conversion, manifest_of, wait_for, wait_for_cursor
from tiny import make_tiny

from exl2flow.core.config import ConversionConfig
from exl2flow.tasks.revisions import Revision, announce

SMALL_FIELDS = ("device", "quality", "calibration", "validate_options")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastingServer]:
    server = LastingServer(
        home=tmp_path_factory.mktemp("server") / "home", folder=tmp_path_factory.mktemp("runs")
    )
    try:
        server.up()
        with temporary_settings({PREFECT_API_URL: server.api_url}):
            yield server
    finally:
        server.call("down")


def parameters(config: ConversionConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def test_run_of_a_deployment_finishes_with_paths_relative_to_the_folder(
    server: LastingServer,
) -> None:
    make_tiny("llama", server.folder / "tiny")

    run = server.submit("convert/convert", parameters(small_config(Path("tiny"), Path("out"))))

    assert server.wait(run) == "Completed"
    assert (server.folder / "out" / "model.safetensors").is_file()
    status = server.status()
    assert status["healthy"]
    assert [entry["state"] for entry in status["runs"] if entry["id"] == str(run)] == ["Completed"]


def test_bad_parameters_are_refused_before_a_run_exists(server: LastingServer) -> None:
    with server.client() as client:
        before = len(client.read_flow_runs())

        with pytest.raises(PrefectHTTPStatusError) as refusal:
            server.submit("convert/convert", {"source": "tiny", "out": "out", "bpw": 99})

        assert refusal.value.response.status_code == 409
        assert "bpw" in refusal.value.response.text
        assert len(client.read_flow_runs()) == before


def test_second_up_repairs_what_is_missing_and_keeps_schedules_as_they_were_set(
    server: LastingServer,
) -> None:
    def nightly(client: Any) -> Any:
        deployment = client.read_deployment_by_name("convert/convert")
        [schedule] = deployment.schedules
        return deployment, schedule

    with server.client() as client:
        deployment, schedule = nightly(client)
        client.update_deployment_schedule(deployment.id, schedule.id, active=True)
        client.delete_deployment(client.read_deployment_by_name("validate/validate").id)
        automation = client.read_automations()[0]
        client.delete_automation(automation.id)
    broken = server.call("status")

    server.up()

    assert broken.returncode == 1
    assert "missing: deployment `validate`" in broken.stderr
    assert f"missing: automation `{automation.name}`" in broken.stderr
    assert server.status()["healthy"]
    with server.client() as client:
        deployment, schedule = nightly(client)
        client.update_deployment_schedule(deployment.id, schedule.id, active=False)
    assert schedule.active


def test_schedule_starts_a_run_by_itself(server: LastingServer, tmp_path: Path) -> None:
    config = small_config(make_tiny("llama", tmp_path / "tiny"), tmp_path / "out")
    with server.client() as client:
        deployment = client.read_deployment_by_name("convert/convert")
        [schedule] = deployment.schedules
        client.update_deployment_schedule(
            deployment.id,
            schedule.id,
            active=True,
            schedule=IntervalSchedule(
                interval=timedelta(minutes=1), anchor_date=datetime.now(UTC) + timedelta(seconds=25)
            ),
            parameters={"config": parameters(config)},
        )

    wait_for((config.out / "model.safetensors").is_file)

    with server.client() as client:
        client.update_deployment_schedule(deployment.id, schedule.id, active=False)
        begun = [run for run in client.read_flow_runs() if run.auto_scheduled and run.run_count]
    assert server.wait(begun[-1].id) == "Completed"


def test_event_of_a_new_revision_starts_a_run_on_it(server: LastingServer) -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    make_tiny("llama", server.folder / f"someone/tiny@{sha}")
    small = parameters(small_config(Path("source"), Path("out")))
    with server.client() as client:
        [automation] = [a for a in client.read_automations() if "revision" in a.name]
        [action] = automation.actions
        assert isinstance(action, RunDeployment)
        given = (action.parameters or {})["config"]
        given |= {name: small[name] for name in SMALL_FIELDS} | {"bpw": [4.0]}
        core = AutomationCore.model_validate(
            automation.model_dump(include={"name", "trigger", "actions"})
        )
        client.update_automation(automation.id, core)

    announce([Revision(repo_id="someone/tiny", revision=sha)])

    out = server.folder / "models/someone/tiny" / sha
    wait_for(lambda: any(out.rglob("model.safetensors")))
    with server.client() as client:
        [run] = [r for r in client.read_flow_runs() if sha in str(r.parameters)]
    assert server.wait(run.id) == "Completed"


def killed_in_the_middle(config: ConversionConfig) -> dict[str, FileIdentity]:
    """Return the identity of what `quantize` has committed, which is a part."""
    manifest = manifest_of(config, "quantize")
    assert manifest["status"] == "partial"
    assert 0 < manifest["cursor"] < manifest["total"]
    [folder] = config.work_dir_root.glob("*/quantize/*")
    files = snapshot(folder)
    return {str(folder / name): files[str(folder / name)] for name in manifest["files"]}


def run_count(server: LastingServer, run: UUID) -> int:
    with server.client() as client:
        return client.read_flow_run(run).run_count


@pytest.mark.slow
def test_server_killed_in_the_middle_comes_back_and_the_run_ends_well(
    server: LastingServer, tmp_path: Path
) -> None:
    config = long_conversion(tmp_path)
    run = server.submit("convert/convert", parameters(config))
    wait_for_cursor(config, "measure", 2)
    before = server.pid("server")

    os.kill(before, signal.SIGKILL)
    wait_for(lambda: server.pid("server") != before)
    wait_for(lambda: server.call("status").returncode == 0)

    assert server.wait(run) == "Completed"
    assert run_count(server, run) == 1
    assert (config.out / "model.safetensors").is_file()


@pytest.mark.slow
def test_run_whose_worker_was_killed_finishes_by_itself_and_repeats_nothing(
    server: LastingServer, tmp_path: Path
) -> None:
    config = long_conversion(tmp_path)
    run = server.submit("convert/convert", parameters(config))
    wait_for_cursor(config, "quantize", 4)

    server.kill("worker")
    finished = killed_in_the_middle(config)

    assert server.wait(run) == "Completed"
    assert run_count(server, run) == 2
    assert finished.items() <= snapshot(config.work_dir_root).items()
    assert json.loads((config.out / "config.json").read_text())["quantization_config"]
