import json
import subprocess
import sys
from importlib import import_module

import pytest
from prefect import Flow

from exl2flow import flows
from exl2flow.core.options.config import PRESETS, ConversionConfig
from exl2flow.flows import FLOWS, convert, sweep


@pytest.mark.parametrize("name", FLOWS)
def test_package_gives_flows_also_when_their_modules_were_imported_before(name: str) -> None:
    import_module(f"exl2flow.flows.{name}")

    assert getattr(flows, name).name == name


def test_flow_is_found_by_the_entrypoint_of_its_deployment() -> None:
    from prefect.flows import load_flow_from_entrypoint

    flow: Flow[..., object] = load_flow_from_entrypoint("exl2flow.flows.convert.convert")

    assert flow.name == "convert"


def test_prefect_is_not_imported_without_need() -> None:
    code = """
import sys
import exl2flow.cli.main
from exl2flow.flows import run_locally
assert not [name for name in sys.modules if name.partition(".")[0] == "prefect"]
"""

    subprocess.run([sys.executable, "-c", code], check=True)


def through_prefect(config: object) -> ConversionConfig:
    """Return what the flow is given for a parameter that came as JSON, or as an object."""
    found = convert.validate_parameters({"config": config})["config"]
    assert isinstance(found, ConversionConfig)
    return found


@pytest.mark.parametrize("quality", PRESETS)
def test_parameters_of_a_deployment_are_filled_from_the_preset(quality: str) -> None:
    given = {"source": "model", "out": "out", "quality": quality, "rounding": {"rounds": 5}}

    found = through_prefect(json.loads(json.dumps(given)))

    assert found == ConversionConfig(**given)
    assert found.rounding.rounds == 5


@pytest.mark.parametrize(
    "target",
    [
        {},
        {"bpw": 3.0},
        {"bpw_total": 3.5},
        {"target_bytes": 10**9},
        {"allocate": {"prefer": "speed"}},
    ],
)
def test_a_configuration_comes_out_of_prefect_as_it_went_in(target: dict[str, object]) -> None:
    config = ConversionConfig(source="model", out="out", quality="exllamav2", **target)

    assert through_prefect(config) == config
    assert through_prefect(config.model_dump(mode="json")) == config


def test_the_form_asks_for_source_and_output_only() -> None:
    schema = convert.parameters.model_dump()["definitions"]["ConversionConfig"]

    assert schema["required"] == ["source", "out"]
    for name in ("bpw", "bpw_total", "target_bytes", "head_bits"):
        assert {"type": "null"} in schema["properties"][name]["anyOf"]
    assert schema["properties"]["quality"]["enum"] == list(PRESETS)


@pytest.mark.parametrize("flow", [convert, sweep])
def test_the_form_offers_the_preference(flow: Flow[..., object]) -> None:
    [prefer] = (
        group["properties"]["prefer"]
        for name, group in flow.parameters.model_dump()["definitions"].items()
        if name == "AllocateOptions"
    )

    assert prefer["enum"] == ["quality", "speed"]
    assert prefer["default"] == "quality"


@pytest.mark.parametrize(("flow", "model"), [(convert, "ConversionConfig"), (sweep, "SweepConfig")])
def test_the_form_offers_publishing_and_asks_then_for_a_repository_only(
    flow: Flow[..., object], model: str
) -> None:
    definitions = flow.parameters.model_dump()["definitions"]

    offered = definitions[model]["properties"]["publish"]["anyOf"]
    assert offered == [{"$ref": "#/definitions/PublishOptions"}, {"type": "null"}]
    assert definitions["PublishOptions"]["required"] == ["repo"]
    assert all("description" in p for p in definitions["PublishOptions"]["properties"].values())


def test_the_form_of_a_sweep_asks_for_source_output_and_bits() -> None:
    schema = sweep.parameters.model_dump()["definitions"]["SweepConfig"]

    assert schema["required"] == ["source", "out", "bpw"]
    assert list(schema["properties"])[:4] == ["source", "out", "quality", "bpw"]
    assert schema["properties"]["bpw"]["minItems"] == 1
