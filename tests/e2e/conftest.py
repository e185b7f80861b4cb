"""Shared by end-to-end tests: servers, which end with the last of these tests, one torch thread.

An idle server takes 6 % of a core.
"""

import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from conversions import small_options
from crash import Conversion, small_model
from hub_server import Hub, serving
from made_once import made_once
from prefect_runs import Swept
from servers import LastingServer, MigratedDatabase
from tiny import make_tiny

from exl2flow.core.options.sweep import SweepConfig


@pytest.fixture(scope="session")
def single_thread() -> Iterator[None]:
    """Keep torch on one thread: its threads wait for each other on tiny matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def database() -> MigratedDatabase:
    """What the first server of all test processes leaves to the others, which need not migrate."""
    folder = Path(os.environ["EXL2FLOW_CACHE"])
    return MigratedDatabase(folder / f"prefect-{version('prefect')}.db")


@pytest.fixture(scope="package")
def prefect_env(
    database: MigratedDatabase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, str]]:
    """Start our temporary server with a home of its own; yield the environment for subprocesses.

    This process uses the server, too, from the first test on that asks for it.
    """
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_LOGGING_TO_API_BATCH_INTERVAL,
        temporary_settings,
    )

    from exl2flow.flows.server.temporary import api

    home = tmp_path_factory.mktemp("prefect-home")
    database.give(home)
    client = {PREFECT_HOME: home, PREFECT_LOGGING_TO_API_BATCH_INTERVAL: 0.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL", "0.5")
        patch.delenv("PREFECT_API_URL", raising=False)
        with temporary_settings(client, restore_defaults={PREFECT_API_URL}), api() as link:
            patch.undo()
            link.wait()
            database.keep(home)
            yield {
                **os.environ,
                "PREFECT_HOME": str(home),
                "PREFECT_API_URL": str(link.url),
                "OMP_NUM_THREADS": "1",
            }


@pytest.fixture(scope="package")
def swept(
    prefect_env: Mapping[str, str], single_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> Swept:
    """A sweep over three bitrates, which tests leave as it was."""
    from exl2flow.flows import sweep

    root = tmp_path_factory.mktemp("sweep")
    given = {
        "source": make_tiny("llama", root / "tiny", num_hidden_layers=1),
        "out": root / "out",
        "bpw": (6, 3, 4),
    }
    config = SweepConfig.model_validate({**given, **small_options()})
    state = sweep(config, return_state=True)
    assert state.is_completed(), state
    run = state.state_details.flow_run_id
    assert run is not None
    return Swept(config, run)


@pytest.fixture(scope="package")
def server_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The Hub of runs of the lasting server; each test has repositories of its own."""
    with serving(tmp_path_factory.mktemp("server-hub")) as running:
        yield running


@pytest.fixture(scope="package")
def lasting_server(
    database: MigratedDatabase, server_hub: Hub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LastingServer]:
    """The server of the fixture `server`."""
    root = tmp_path_factory.mktemp("server")
    server = LastingServer(
        home=root / "home",
        folder=tmp_path_factory.mktemp("runs"),
        env={
            "HF_ENDPOINT": server_hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(root / "huggingface"),
        },
    )
    database.give(server.home / "prefect")
    try:
        server.up()
        database.keep(server.home / "prefect")
        yield server
    finally:
        server.call("down")


@pytest.fixture
def server(lasting_server: LastingServer) -> Iterator[LastingServer]:
    """A lasting server with one worker, which this process uses during the test.

    All tests share it: one that ends it or changes what it holds brings it back.
    """
    with lasting_server.used():
        yield lasting_server


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion that ran to its end in one go; to be read, not changed."""

    def convert(folder: Path) -> None:
        Conversion.inside(folder, small_model(folder / "model")).finish()

    folder = made_once(tmp_path_factory, "undisturbed", convert)
    return Conversion.inside(folder, folder / "model")
