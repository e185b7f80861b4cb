"""Which targets the candidates can reach, and what is said about those that they cannot."""

import json
from pathlib import Path

import pytest
from conversions import small_config
from measurements import decoder_projections, written_in_nats
from stage_runs import foreign_measurement
from tiny import make_tiny

from exl2flow.core.errors import BudgetUnreachable
from exl2flow.core.options.config import ConversionConfig
from exl2flow.model import resolve
from exl2flow.quant.allocate.bit_range import BitRange
from exl2flow.quant.allocate.budget import decoder_numel, total_target
from exl2flow.quant.measure.candidates import PROJECTION_OPTIONS, candidates_for, is_allowed
from exl2flow.quant.measure.measurement import candidate_bits, projection_bits


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def config_of(source: Path, **values: object) -> ConversionConfig:
    return small_config(source, source.parent / "out", **values)


def reach_of(config: ConversionConfig) -> BitRange:
    return BitRange.of(config, resolve(config.source))


def output_of(config: ConversionConfig) -> int:
    """Return the bytes of the output, without headers."""
    reach = reach_of(config)
    return reach.plain + reach.packed_bytes(config, resolve(config.source))


@pytest.mark.parametrize("kind", ["fisher", "error"])
def test_what_is_reachable_depends_on_the_slots(kind: str, source: Path) -> None:
    spec = resolve(source)
    if kind == "fisher":
        bits = [
            [
                projection_bits(p, params)
                for params in PROJECTION_OPTIONS
                if is_allowed("quality", [params])
            ]
            for p in decoder_projections(spec)
        ]
    else:
        bits = [
            [candidate_bits(s.projections, c) for c in candidates_for(s.parts[0])]
            for s in spec.sublayers
        ]

    bpw = reach_of(config_of(source, sensitivity={"kind": kind})).bpw

    numel = decoder_numel(spec)
    assert bpw == (sum(map(min, bits)) / numel, sum(map(max, bits)) / numel)


def test_unreachable_target_names_the_range(source: Path) -> None:
    low, high = reach_of(config_of(source)).bpw

    with pytest.raises(BudgetUnreachable, match=r"^2\.5 bits per weight are out") as refusal:
        output_of(config_of(source, bpw=2.5))

    assert f"{low:.3f} to {high:.3f}" in str(refusal.value)


def test_target_above_the_range_is_accepted(source: Path, tmp_path: Path) -> None:
    path = written_in_nats(tmp_path / "measurement.json", resolve(source))
    content = json.loads(path.read_text())
    entries = content["measurement"].values()
    for slot in entries:
        del slot[4:]
    path.write_text(json.dumps(content))

    configs = [config_of(source, bpw=bpw, measurement=path) for bpw in (7.0, 8.0)]

    assert reach_of(configs[0]).bpw[1] < 7
    assert output_of(configs[0]) == output_of(configs[1])


@pytest.mark.parametrize(
    ("values", "target"),
    [({"target_bytes": 120_000}, "120000bytes"), ({"bpw_total": 9.5}, "9.5bpw-total")],
)
def test_a_total_is_the_planned_size_of_the_output(
    values: dict[str, object], target: str, source: Path
) -> None:
    config = config_of(source, **values)

    assert config.target == target
    assert output_of(config) == total_target(config, resolve(source))


def test_a_total_beyond_the_range_is_used_as_far_as_possible(source: Path) -> None:
    config = config_of(source, target_bytes=10**9)

    assert output_of(config) < 200_000


@pytest.mark.parametrize("head", [{}, {"head_bits": 8}])
def test_an_unreachable_total_names_the_least(head: dict[str, object], source: Path) -> None:
    with pytest.raises(BudgetUnreachable, match=r"^a total of 1,000 bytes is out") as refusal:
        output_of(config_of(source, target_bytes=1000, **head))

    problem = str(refusal.value)
    least = int(problem.partition("has about ")[2].partition(";")[0].replace(",", ""))
    output_of(config_of(source, target_bytes=least, **head))
    with pytest.raises(BudgetUnreachable):
        output_of(config_of(source, target_bytes=least - 1, **head))


def test_given_measurement_decides_what_is_reachable(source: Path, tmp_path: Path) -> None:
    path = foreign_measurement(tmp_path / "measurement.json", resolve(source))
    content = json.loads(path.read_text())
    content["measurement"] = {
        name: entries and entries[10:] for name, entries in content["measurement"].items()
    }
    path.write_text(json.dumps(content))

    low, _ = reach_of(config_of(source, bpw=6, measurement=path)).bpw

    assert low > reach_of(config_of(source)).bpw[0]
