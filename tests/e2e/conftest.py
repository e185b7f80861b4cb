"""Shared by end-to-end tests: one Prefect server for the session, one torch thread."""

import os
from collections.abc import Iterator, Mapping

import pytest
import torch
from crash import Conversion, small_model


@pytest.fixture(scope="session")
def single_thread() -> Iterator[None]:
    """Keep torch on one thread: its threads wait for each other on tiny matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def prefect_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Start our temporary server with a home of its own; yield the environment for subprocesses.

    This process uses the server, too, from the first test on that asks for it.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    from exl2flow.flows.server import api

    home = tmp_path_factory.mktemp("prefect-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(home))
        patch.delenv("PREFECT_API_URL", raising=False)
        with (
            temporary_settings({PREFECT_HOME: home}, restore_defaults={PREFECT_API_URL}),
            api() as link,
        ):
            patch.undo()
            link.wait()
            yield {
                **os.environ,
                "PREFECT_HOME": str(home),
                "PREFECT_API_URL": str(link.url),
                "OMP_NUM_THREADS": "1",
            }


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion that ran to its end in one go; to be read, not changed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    conversion = Conversion.inside(folder, small_model(folder / "model"))
    conversion.finish()
    return conversion
