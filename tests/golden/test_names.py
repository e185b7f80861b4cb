"""Names that stand in deployments, homes, units and programs of earlier versions still work."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from prefect.flows import Flow, load_flow_from_entrypoint

FLOWS = ("convert", "measure", "sweep", "refine", "validate", "publish", "watch")


@pytest.mark.parametrize("name", FLOWS)
def test_an_entry_point_of_a_deployment_is_found(name: str) -> None:
    found = load_flow_from_entrypoint(f"exl2flow.flows.{name}.{name}")

    assert isinstance(found, Flow)
    assert found.name == name


@pytest.mark.parametrize("name", ["services", "application", "ordering", "worker"])
def test_a_module_that_a_home_or_a_unit_starts_is_there(name: str) -> None:
    assert find_spec(f"exl2flow.flows.server.{name}") is not None


@pytest.mark.parametrize("name", ["adapters", "chat", "drafts", "filters", "generate", "sampling"])
def test_a_room_of_the_engine_has_the_name_that_it_had_in_inference(name: str) -> None:
    import_module("exl2flow.inference")

    assert import_module(f"exl2flow.inference.{name}") is import_module(f"exl2flow.engine.{name}")


def test_the_program_runs_by_its_first_name() -> None:
    words = [sys.executable, "-m", "exl2flow.flows.cli", "--version"]

    done = subprocess.run(words, capture_output=True, text=True, timeout=120)

    assert done.stdout.startswith("exl2flow 0."), done.stderr
