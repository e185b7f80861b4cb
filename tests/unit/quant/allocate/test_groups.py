"""Experts of a layer that are allotted the same parameters, role by role."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from conversions import small_config
from measurements import decoder_projections, written_in_nats
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.model import ModelSpec, resolve
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.allocate.budget import Allocation, allot, read_candidates
from exl2flow.quant.allocate.groups import grouped
from exl2flow.quant.allocate.layout import output_bytes
from exl2flow.quant.allocate.stage import ALLOCATE
from exl2flow.quant.measure.candidates import candidates_for
from exl2flow.quant.measure.measurement import candidate_bits
from exl2flow.quant.measure.results import Results

LAYER = {"experts": "layer"}
SHARD_MB = 8192


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("experts") / "model"
    return resolve(make_tiny("mixtral", folder, num_local_experts=8))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return resolve(make_tiny("llama", tmp_path_factory.mktemp("dense") / "model"))


def config_of(spec: ModelSpec, path: Path, **values: object) -> ConversionConfig:
    return small_config(spec.source_dir, path.parent / "out", measurement=path, **values)


def allotted(spec: ModelSpec, path: Path, **values: object) -> Allocation:
    config = config_of(spec, path, **values)
    return allot(config, spec, read_candidates(config, spec, path))


def by_layer_and_role(
    spec: ModelSpec, params: Mapping[str, QuantParams]
) -> dict[tuple[int, str], set[QuantParams]]:
    """Return the parameters that the experts of a layer have in a role."""
    found: dict[tuple[int, str], set[QuantParams]] = {}
    for sublayer in spec.sublayers:
        for p in sublayer.projections:
            if p.name.startswith("experts."):
                found.setdefault((sublayer.layer_index, p.role), set()).add(params[p.key])
    return found


def test_experts_of_a_layer_and_role_get_the_same_parameters(
    spec: ModelSpec, tmp_path: Path
) -> None:
    path = written_in_nats(tmp_path / "measurement.json", spec)

    each, layer = (allotted(spec, path, allocate=o, bpw=4.5) for o in ({}, LAYER))

    alike = by_layer_and_role(spec, layer.params)
    assert len(alike) == 3 * spec.num_layers
    assert {len(found) for found in alike.values()} == {1}
    assert max(len(found) for found in by_layer_and_role(spec, each.params).values()) > 1
    assert layer.used_bits <= layer.budget_bits == each.budget_bits
    assert each.value <= layer.value
    assert layer.value == pytest.approx(sum(r.nats or 0 for r in layer.choice.values()))


def test_a_total_is_kept_to(spec: ModelSpec, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "measurement.json", spec)
    target = output_bytes(spec, allotted(spec, path, bpw=4.0).params, SHARD_MB)

    layer = allotted(spec, path, allocate=LAYER, target_bytes=target, head_bits=6)

    assert 0.99 * target <= output_bytes(spec, layer.params, SHARD_MB) <= target
    assert {len(found) for found in by_layer_and_role(spec, layer.params).values()} == {1}


def test_a_common_candidate_takes_and_costs_what_it_does_in_each_slot(
    spec: ModelSpec, tmp_path: Path
) -> None:
    path = written_in_nats(tmp_path / "measurement.json", spec)
    slots = read_candidates(config_of(spec, path, allocate=LAYER), spec, path).decoder
    groups = grouped(spec, slots, "layer")

    assert [len(group.slots) for group in groups if len(group.slots) > 1] == [8] * 6
    assert {name for group in groups for name in group.slots} == {*slots}
    for group in groups:
        bits = group.sums([slots[name].bits.tolist() for name in group.slots])
        for index, total in enumerate(bits):
            chosen = [slots[name][at] for name, at in group.chosen(index).items()]
            assert sum(r.total_bits for r in chosen) == total
            assert len({str([*r.params.values()]) for r in chosen}) == 1


def test_dense_models_are_allotted_as_ever(dense: ModelSpec, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "measurement.json", dense)

    assert allotted(dense, path, allocate=LAYER) == allotted(dense, path)


def test_parts_measured_by_exllamav2s_objective_choose_together(spec: ModelSpec) -> None:
    slots = {
        part.name: Results(
            candidates=candidates_for(part)[:4],
            bits=np.array([candidate_bits(part.projections, c) for c in candidates_for(part)[:4]]),
            accuracy=np.full(4, 0.9),
        )
        for sublayer in spec.sublayers
        for part in sublayer.parts
    }

    joined = [len(group.slots) for group in grouped(spec, slots, "layer")]

    experts = [len(s.parts) for s in spec.sublayers if s.kind == "experts"]
    assert sorted(joined, reverse=True)[: len(experts)] == experts
    assert sum(joined) == len(slots)


def test_experts_measured_differently_are_refused_by_name(spec: ModelSpec, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "measurement.json", spec)
    content = json.loads(path.read_text())
    key, other = (
        next(p.key for p in decoder_projections(spec) if p.name.startswith(f"experts.{e}."))
        for e in (0, 1)
    )
    measured = content["measurement"]
    measured[key], measured[other] = measured[key][:3], measured[other][3:]
    path.write_text(json.dumps(content))

    with pytest.raises(
        ConfigError, match=r"experts\.0\..*other candidates; leave out `--experts layer`"
    ):
        allotted(spec, path, allocate=LAYER, bpw=6.0)


def test_allocations_from_before_the_option_stay_valid(spec: ModelSpec, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "measurement.json", spec)
    default, layer = (ALLOCATE.options(config_of(spec, path, allocate=o)) for o in ({}, LAYER))

    assert "experts" not in default
    assert default["allocate"] == {"objective": "power", "power": 2.0, "rounds": 0}
    assert layer == {**default, "experts": "layer"}
