"""Runs whose worker or server was killed before anybody heard of their state."""

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from conversions import small_config
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.states import Crashed, Pending, Running, State, Submitting
from prefect_runs import run_state
from servers import LastingServer, wait_for
from tiny import make_tiny

from exl2flow.flows.server.services import POOL, answers

REQUEUED = "Requeued"
RETRIES = 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LastingServer]:
    server = LastingServer(home=tmp_path / "home", folder=tmp_path)
    try:
        server.up()
        with server.used():
            yield server
    finally:
        server.call("down")


def wait_for_begin(server: LastingServer, seconds: float) -> None:
    """Send runs back to the queue if they do not begin within this time."""
    set_wait(server, "back to the queue", seconds)


def set_wait(server: LastingServer, rule: str, seconds: float) -> None:
    """Let a rule wait for this time."""
    with server.client() as client:
        [automation] = [a for a in client.read_automations() if rule in a.name]
        trigger = automation.trigger
        assert isinstance(trigger, EventTrigger)
        trigger.within = timedelta(seconds=seconds)
        core = AutomationCore.model_validate(
            automation.model_dump(include={"name", "trigger", "actions"})
        )
        client.update_automation(automation.id, core)


def pause_pool(server: LastingServer, *, paused: bool) -> None:
    with server.client() as client:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=paused))


def submit(server: LastingServer, name: str) -> UUID:
    source = make_tiny("llama", server.folder / name)
    config = small_config(source, server.folder / f"{name}-out")
    return server.submit("convert/convert", config.model_dump(mode="json"))


@pytest.mark.slow
def test_runs_that_did_not_begin_go_back_to_the_queue_a_few_times(server: LastingServer) -> None:
    wait_for_begin(server, 90)  # the second process needs some time to begin
    run = submit(server, "early")
    wait_for(lambda: run_state(run) == "Submitting")
    server.kill("worker")
    check_completed(server, run)

    pause_pool(server, paused=True)
    never = submit(server, "never")
    wait_for_begin(server, 10)  # the shortest time that Prefect allows
    for _ in range(RETRIES + 1):
        with server.client() as client:
            client.set_flow_run_state(never, Submitting())  # as a worker does that is killed then
        wait_for(lambda: run_state(never) in (REQUEUED, "Failed"))
    check_failed(server, never)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "heard"), [(Crashed(), {"AwaitingRetry"}), (Running(), {"Crashed", "AwaitingRetry"})]
)
def test_run_whose_last_state_died_with_the_server_goes_on(
    server: LastingServer, last: State, heard: set[str]
) -> None:
    set_wait(server, "heartbeat", 10)
    pause_pool(server, paused=True)
    run, pid = submit(server, "tiny"), server.pid("server")
    with server.client() as client:
        for state in (Pending(), *([Running()] if last.is_crashed() else []), last):
            client.set_flow_run_state(run, state)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: server.pid("server") not in (0, pid))
        wait_for(lambda: answers(server.api_url))
        wait_for(lambda: run_state(run) == "AwaitingRetry", pause=1)
        names = [state.name for state in client.read_flow_run_states(run)]
    assert heard <= set(names), names


@pytest.mark.slow
def test_run_that_crashed_before_it_began_is_queued_again(server: LastingServer) -> None:
    pause_pool(server, paused=True)
    run = submit(server, "tiny")
    with server.client() as client:
        for state in (Pending(), Crashed()):  # as a worker does whose run's process ended at once
            client.set_flow_run_state(run, state)
    wait_for(lambda: run_state(run) in (REQUEUED, "Late"))

    pause_pool(server, paused=False)

    check_completed(server, run)


def check_completed(server: LastingServer, run: UUID) -> None:
    assert server.wait(run) == "Completed"
    with server.client() as client:
        assert client.read_flow_run(run).run_count == 1
        names = [state.name for state in client.read_flow_run_states(run)]
    assert names.count(REQUEUED) == 1
    assert names.count("Running") == 1


def check_failed(server: LastingServer, run: UUID) -> None:
    wait_for(lambda: run_state(run) == "Failed")
    with server.client() as client:
        found = client.read_flow_run(run)
        states = client.read_flow_run_states(run)
    assert found.state is not None
    assert f"did not begin {RETRIES + 1} times" in str(found.state.message)
    assert [state.name for state in states].count(REQUEUED) == RETRIES + 1
    assert StateType.RUNNING not in [state.type for state in states]
