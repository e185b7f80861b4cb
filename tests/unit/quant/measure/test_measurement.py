"""Reading measurements of both kinds, ours and exllamav2's, and refusing those that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measurements import HEAD_OPTIONS, OPTIONS, measured_in_nats, written_in_nats
from stage_runs import foreign_measurement
from tiny import make_tiny

from exl2flow.core.errors import ConfigError, CorruptCheckpoint
from exl2flow.model import ModelSpec, QuantParams, resolve
from exl2flow.quant.measure.candidates import candidates_for, parse_params
from exl2flow.quant.measure.measurement import (
    CandidateResult,
    candidate_bits,
    projection_bits,
    read_measurement,
    slot_projections,
)

Write = Callable[[Path, ModelSpec], Path]
Edit = Callable[[dict[str, Any]], object]
FIRST = r"`model\.layers\.0\.self_attn(\.q_proj)?"  # of the slots


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model whose columns must be padded and whose attention has biases."""
    return resolve(make_tiny("qwen2", tmp_path_factory.mktemp("model"), head_dim=24))


@pytest.fixture(params=[foreign_measurement, written_in_nats], ids=lambda write: write.__name__)
def write(request: pytest.FixtureRequest) -> Write:
    """What writes a measurement of either kind."""
    return request.param  # type: ignore[no-any-return]  # a parameter of the fixture


def edited(path: Path, edit: Edit) -> Path:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def test_slots_are_sublayers_and_single_projections(spec: ModelSpec) -> None:
    slots = slot_projections(spec)

    assert [p.name for p in slots["model.layers.1.mlp"]] == ["gate_proj", "up_proj", "down_proj"]
    assert [p.name for p in slots["model.layers.0.self_attn.o_proj"]] == ["o_proj"]
    assert slots["lm_head"] == (spec.head,)
    assert len(slots) == 2 * (2 + 7) + 1  # sublayers, projections, head


def test_bits_of_a_projection_are_all_that_is_stored(spec: ModelSpec) -> None:
    _, k_proj, *_ = spec.sublayers[0].projections
    params = parse_params("4 g64")

    # one group of 64 rows, 48 columns padded to 64, a bias, the permutation and the table
    expected = 64 * 64 * 4 + (4 * 64 + 16 + 32) + 32 * 64 + 16 * 64
    assert (k_proj.in_features, k_proj.out_features, k_proj.has_bias) == (64, 48, True)
    assert projection_bits(k_proj, params) == expected
    assert candidate_bits([k_proj], {"k_proj": params}) == expected


def test_bits_of_a_candidate_are_those_of_its_projections(spec: ModelSpec) -> None:
    sublayer = spec.sublayers[1]
    candidate = candidates_for(sublayer.parts[0])[4]

    found = candidate_bits(sublayer.projections, candidate)

    assert found == sum(projection_bits(p, candidate[p.name]) for p in sublayer.projections)


def test_entry_of_exllamav2_is_read() -> None:
    entry = {
        "accuracy": 0.9712,
        "total_bits": 143142912,
        "q_proj": {
            "group_size": {"3": 64, "2": 64},
            "bits": [3, 2],
            "bits_prop": [0.05, 0.95],
            "scale_bits": 4,
        },
    }

    result = CandidateResult.from_json(json.loads(json.dumps(entry)))

    params = QuantParams(bit_widths=(3, 2), proportions=(0.05, 0.95), group_sizes=(64, 64))
    assert (result.accuracy, result.total_bits, result.nats) == (0.9712, 143142912, None)
    assert result.params == {"q_proj": params}
    assert result.to_json() == entry


def test_entry_in_nats_is_read_back_as_it_was() -> None:
    result = CandidateResult(
        accuracy=0.93, total_bits=12, params={"q_proj": parse_params("3 g128")}, nats=0.0125
    )

    entry = json.loads(json.dumps(result.to_json()))

    assert entry["nats"] == 0.0125
    assert CandidateResult.from_json(entry) == result


def test_sublayers_are_the_slots_of_a_measurement_of_exllamav2(
    spec: ModelSpec, tmp_path: Path
) -> None:
    found = read_measurement(foreign_measurement(tmp_path / "m.json", spec), spec)

    assert list(found.decoder) == [sublayer.name for sublayer in spec.sublayers]
    assert list(found.head) == []
    for sublayer in spec.sublayers:
        results = found.decoder[sublayer.name]
        assert [result.params for result in results] == list(candidates_for(sublayer.parts[0]))
        assert all(result.nats is None for result in results)


@pytest.mark.parametrize("head", [True, False])
def test_projections_are_the_slots_of_a_measurement_in_nats(
    head: bool, spec: ModelSpec, tmp_path: Path
) -> None:
    expected = measured_in_nats(spec)

    found = read_measurement(written_in_nats(tmp_path / "m.json", spec, head=head), spec)

    assert {name: list(results) for name, results in found.decoder.items()} == {
        name: list(results) for name, results in expected.decoder.items()
    }
    assert list(found.decoder) == [p.key for s in spec.sublayers for p in s.projections]
    assert list(found.head) == (list(expected.head) if head else [])
    assert len(found.decoder["model.layers.0.mlp.up_proj"]) == len(OPTIONS)
    assert len(expected.head) == len(HEAD_OPTIONS)


def test_measured_sublayers_come_before_projections(spec: ModelSpec, tmp_path: Path) -> None:
    path = foreign_measurement(tmp_path / "m.json", spec)
    in_nats = json.loads(written_in_nats(tmp_path / "n.json", spec).read_text())

    found = read_measurement(
        edited(path, lambda content: content["measurement"].update(in_nats["measurement"])), spec
    )

    assert list(found.decoder) == [sublayer.name for sublayer in spec.sublayers]
    assert len(found.head) == len(HEAD_OPTIONS)


def first_entry(content: dict[str, Any]) -> dict[str, Any]:
    """Return the first candidate of the first slot."""
    slots = [value for value in content["measurement"].values() if value]
    entry: dict[str, Any] = slots[0][0]
    return entry


def drop(name: str) -> Edit:
    return lambda content: content.pop(name)


def change(name: str, value: object) -> Edit:
    return lambda content: first_entry(content).update({name: value})


def put(value: object) -> Edit:
    """Replace the candidates of the first slot."""

    def edit(content: dict[str, Any]) -> None:
        name = next(name for name, value in content["measurement"].items() if value)
        content["measurement"][name] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (drop("measurement"), "is not a measurement of .*measure again"),
        (drop("last_module_idx"), "is not a measurement of .*measure again"),
        (lambda content: first_entry(content).pop("accuracy"), "is not a measurement of"),
        (lambda content: first_entry(content).pop("total_bits"), "is not a measurement of"),
        (change("accuracy", "high"), "is not a measurement of"),
        (change("accuracy", 1.5), "has an accuracy of 1.5, which is not between 0 and 1"),
        (change("accuracy", -0.1), "has an accuracy of -0.1, which is not between 0 and 1"),
        (change("accuracy", float("nan")), "has an accuracy of nan"),
        (change("total_bits", 12345), "states 12345 bits .* it is of another model"),
        (change("q_proj", {"bits": [7]}), "not quantization parameters"),
        (change("up_proj", {}), "not quantization parameters"),
        (change("nats", "many"), "is not a measurement of"),
        (change("nats", float("nan")), "nan"),
        (change("nats", float("inf")), "inf"),
        (change("nats", -0.5), "-0.5"),
        (put(None), "is not a measurement of"),
        (put([]), rf"{FIRST}` lists no candidates; measure again"),
        (change("down_proj", parse_params("4 g32").to_json()), rf"{FIRST}` lists \['down_proj'"),
    ],
)
def test_damaged_measurement_is_refused_by_name(
    edit: Edit, problem: str, write: Write, spec: ModelSpec, tmp_path: Path
) -> None:
    path = edited(write(tmp_path / "m.json", spec), edit)

    with pytest.raises(ConfigError, match=problem) as refusal:
        read_measurement(path, spec)

    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("content", ["[1, 2]", "{}", "3"])
def test_other_json_is_refused(content: str, spec: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=r"m\.json` is not a measurement"):
        read_measurement(path, spec)


def test_file_that_is_no_json_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("{")

    with pytest.raises(CorruptCheckpoint, match=r"m\.json"):
        read_measurement(tmp_path / "m.json", spec)


def test_slot_that_is_missing_is_named(write: Write, spec: ModelSpec, tmp_path: Path) -> None:
    path = write(tmp_path / "m.json", spec)
    measured = json.loads(path.read_text())["measurement"]
    last = [name for name in measured if name.startswith("model.layers.1.mlp")][-1]

    with pytest.raises(ConfigError, match=last.replace(".", r"\.")):
        read_measurement(edited(path, lambda content: content["measurement"].pop(last)), spec)


def test_candidate_that_lacks_a_projection_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    path = foreign_measurement(tmp_path / "m.json", spec)

    with pytest.raises(ConfigError, match=r"self_attn` lists \['o_proj', 'q_proj', 'v_proj'\]"):
        read_measurement(edited(path, lambda content: first_entry(content).pop("k_proj")), spec)


def test_costs_of_some_candidates_only_are_refused(spec: ModelSpec, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "m.json", spec)

    with pytest.raises(ConfigError, match=r"self_attn\.q_proj"):
        read_measurement(edited(path, lambda content: first_entry(content).pop("nats")), spec)


def test_head_of_another_vocabulary_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "m.json", spec)

    def grow(content: dict[str, Any]) -> None:
        content["measurement"]["lm_head"][0]["total_bits"] += 32

    with pytest.raises(ConfigError, match=r"bits for `lm_head`.* another model"):
        read_measurement(edited(path, grow), spec)


def test_measurement_of_a_model_of_other_shapes_is_refused(
    write: Write, spec: ModelSpec, tmp_path: Path
) -> None:
    other = resolve(make_tiny("qwen2", tmp_path / "other", hidden_size=128))
    deeper = resolve(make_tiny("qwen2", tmp_path / "deeper", num_hidden_layers=3, head_dim=24))
    path = write(tmp_path / "m.json", spec)

    with pytest.raises(ConfigError, match="it is of another model"):
        read_measurement(path, other)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.self_attn"):
        read_measurement(path, deeper)
