"""A lasting server with a real worker: access, starts of runs, kills, down and up."""

import base64
import http.client
import json
import logging
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from conversions import FileIdentity, snapshot
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.schemas.automations import Automation, EventTrigger
from prefect.events.schemas.events import ResourceSpecification
from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings
from prefect.states import Cancelling, Crashed
from prefect_runs import log_lines, run_count, run_state
from servers import LastingServer, long_conversion, manifest_of, wait_for, wait_for_cursor
from typer.testing import CliRunner
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from exl2flow.cli.main import app
from exl2flow.core.options.config import ConversionConfig
from exl2flow.flows.server.deployments import core, marked
from exl2flow.pipeline.local import run_locally

CREATE = "/deployments/filter"
SERVICES = {"supervisor", "server", "worker"}


def ask(server: LastingServer, method: str, path: str, **headers: str) -> tuple[int, str]:
    """Return status and body of a request for the API, as a browser sends it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request(method, f"/api{path}", "{}" if method == "POST" else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def permission(server: LastingServer, origin: str) -> int:
    """Return the status with which the API permits pages of this origin to create a run."""
    wanted = {"Access-Control-Request-Method": "POST"}
    wanted["Access-Control-Request-Headers"] = "authorization,content-type"
    return ask(server, "OPTIONS", CREATE, Origin=origin, **wanted)[0]


def test_only_who_has_the_password_may_ask_the_api_and_no_other_web_page(
    server: LastingServer,
) -> None:
    own, other = f"http://127.0.0.1:{server.port}", "https://example.test"
    login = {"Authorization": f"Basic {base64.b64encode(server.auth.encode()).decode()}"}
    wrong = {"Authorization": f"Basic {base64.b64encode(b'exl2flow:wrong').decode()}"}

    assert permission(server, other) == permission(server, "null") == 400
    assert permission(server, own) == permission(server, f"http://localhost:{server.port}") == 200
    assert ask(server, "POST", CREATE)[0] == ask(server, "POST", CREATE, **wrong)[0] == 401
    assert ask(server, "POST", CREATE, Origin=other)[0] == 401  # sent without a permission
    assert ask(server, "POST", CREATE, **login)[0] == 200
    assert ask(server, "GET", "/health")[0] == 200
    with pytest.raises(InvalidStatus, match="HTTP 403"), connect(f"ws://{own[7:]}/api/events/in"):
        pass
    assert (server.home / "server.json").stat().st_mode & 0o777 == 0o600
    home = ("--home", str(server.home))
    assert CliRunner().invoke(app, ["server", "password", *home]).stdout == f"{server.auth}\n"
    status = CliRunner().invoke(app, ["server", "status", *home])
    assert f"{server.port}" in status.output
    assert server.auth not in status.output
    with temporary_settings({PREFECT_API_AUTH_STRING: "me:wrong"}):
        refused = CliRunner().invoke(app, ["server", "apply"])
    assert refused.exit_code == 1
    assert "refuses the password (HTTP 401); set PREFECT_API_AUTH_STRING" in refused.stderr


def parameters(config: ConversionConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def make_old(client: SyncPrefectClient, automation: Automation) -> None:
    """Replace a rule by one that an older version wrote, and that is switched off."""
    then = core(automation)
    assert isinstance(then.trigger, EventTrigger)
    then.trigger.match = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.none"})
    then.description, then.enabled = "of an older version", False
    client.update_automation(automation.id, marked(then))


@pytest.mark.slow
def test_second_up_repairs_what_is_missing_and_keeps_what_was_set(server: LastingServer) -> None:
    with server.client() as client:
        client.delete_deployment(client.read_deployment_by_name("validate/validate").id)
        [automation] = [a for a in client.read_automations() if "without a heartbeat" in a.name]
        client.delete_automation(automation.id)
        [old] = [a for a in client.read_automations() if "a crashed run" in a.name]
        current = core(old)
        make_old(client, old)
        broken = server.call("status")
        yearly = IntervalSchedule(interval=timedelta(days=365), anchor_date=datetime.now(UTC))

        config = {"source": "mine", "out": "out", "bpw": 3}
        with server.schedule("convert/convert", yearly, config), server.trigger(enabled=False):
            server.up()

            [schedule] = client.read_deployment_by_name("convert/convert").schedules
            [trigger] = [a for a in client.read_automations() if "revision" in a.name]
            renewed = client.read_automation(old.id)
        assert renewed is not None
        assert core(renewed) == current.model_copy(update={"enabled": False})
        client.update_automation(old.id, current)

    assert broken.returncode == 1
    assert "missing: `validate`" in broken.stderr
    assert f"missing: `{automation.name}`" in broken.stderr
    assert server.is_healthy()
    assert schedule.active
    assert schedule.schedule == yearly
    assert schedule.parameters == {"config": config}
    assert not trigger.enabled


@pytest.mark.slow
def test_down_leaves_no_process_of_a_run_under_way(server: LastingServer, tmp_path: Path) -> None:
    config = long_conversion(tmp_path)
    run = server.submit("convert/convert", parameters(config))
    wait_for_cursor(config, "measure", 2)
    try:
        done = server.call("down")

        assert done.returncode == 0, done.stderr
        assert set(done.stderr.strip().removeprefix("ended: ").split(", ")) == SERVICES
        assert server.processes() == []
        assert killed_in_the_middle(config, "measure")
        assert server.call("status").returncode == 1
    finally:
        server.up()
        with server.client() as client:
            client.delete_flow_run(run)  # it would go on


@pytest.mark.slow
def test_server_killed_in_the_middle_comes_back_and_the_run_ends_well(
    server: LastingServer, tmp_path: Path
) -> None:
    config = long_conversion(tmp_path)
    run = server.submit("convert/convert", parameters(config))
    wait_for_cursor(config, "measure", 2)
    before = server.pid("server")

    os.kill(before, signal.SIGKILL)
    wait_for(lambda: server.pid("server") not in (0, before))
    wait_for(lambda: server.call("status").returncode == 0)

    assert server.wait(run) == "Completed"
    assert run_count(run) == 1
    assert (config.out / "model.safetensors").is_file()


def killed_in_the_middle(config: ConversionConfig, stage: str) -> dict[str, FileIdentity]:
    """Return the identity of what a stage has committed, which is a part."""
    manifest = manifest_of(config, stage)
    assert manifest["status"] == "partial"
    assert 0 < manifest["cursor"] < manifest["total"]
    [folder] = config.work_dir_root.glob(f"*/{stage}/*")
    files = snapshot(folder)
    return {str(folder / name): files[str(folder / name)] for name in manifest["files"]}


@pytest.mark.slow
def test_killed_run_finishes_by_itself_repeats_nothing_and_gives_the_same_bytes(
    server: LastingServer, tmp_path: Path
) -> None:
    config = long_conversion(tmp_path)
    whole = config.model_copy(update={"out": tmp_path / "o2", "work_root": tmp_path / "other"})
    run_locally(whole)
    run = server.submit("convert/convert", parameters(config))

    wait_for_cursor(config, "measure", 4)
    worker = server.pid("worker")
    [flow] = server.flow_processes("worker")
    os.kill(flow, signal.SIGKILL)
    finished = killed_in_the_middle(config, "measure")
    wait_for_cursor(config, "quantize", 4)
    assert server.pid("worker") == worker
    server.kill("worker")
    finished |= killed_in_the_middle(config, "quantize")

    assert server.wait(run) == "Completed"
    assert run_count(run) == 3
    assert finished.items() <= snapshot(config.work_dir_root).items()
    assert json.loads((config.out / "config.json").read_text())["quantization_config"]
    made, expected = (folder / "model.safetensors" for folder in (config.out, whole.out))
    assert made.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_run_that_only_counts_as_crashed_ends_in_its_own_process(
    server: LastingServer, tmp_path: Path
) -> None:
    config = long_conversion(tmp_path)
    run = server.submit("convert/convert", parameters(config))
    wait_for_cursor(config, "measure", 2)
    worker = server.pid("worker")

    with server.client() as client:
        client.set_flow_run_state(run, Crashed(), force=True)
    wait_for(lambda: run_state(run) == "AwaitingRetry")

    assert server.wait(run) == "Completed"
    assert run_count(run) == 1
    assert server.pid("worker") == worker
    assert (config.out / "model.safetensors").is_file()


@pytest.mark.slow
def test_cancelled_run_keeps_what_was_finished(server: LastingServer, tmp_path: Path) -> None:
    config = long_conversion(tmp_path)
    run = server.submit("convert/convert", parameters(config))
    wait_for_cursor(config, "measure", 2)
    with server.client() as client:
        client.set_flow_run_state(run, Cancelling())

    assert server.wait(run) == "Cancelled"
    assert killed_in_the_middle(config, "measure")
    assert not [log for log in log_lines(run) if log.level > logging.WARNING]
    wait_for(lambda: server.flow_processes("worker") == [])
