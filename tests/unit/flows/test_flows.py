import subprocess
import sys

from prefect import Flow


def test_package_gives_flows_also_when_their_modules_were_imported_before() -> None:
    code = """
import importlib
for name in ("convert", "measure", "validate"):
    importlib.import_module(f"exl2flow.flows.{name}")
from exl2flow.flows import convert, measure, validate
assert [flow.name for flow in (convert, measure, validate)] == ["convert", "measure", "validate"]
"""

    subprocess.run([sys.executable, "-c", code], check=True)


def test_flow_is_found_by_the_entrypoint_of_its_deployment() -> None:
    from prefect.flows import load_flow_from_entrypoint

    flow: Flow[..., object] = load_flow_from_entrypoint("exl2flow.flows.convert.convert")

    assert flow.name == "convert"


def test_prefect_is_not_imported_without_need() -> None:
    code = """
import sys
import exl2flow.flows.cli
from exl2flow.flows import run_locally
assert not [name for name in sys.modules if name.partition(".")[0] == "prefect"]
"""

    subprocess.run([sys.executable, "-c", code], check=True)
