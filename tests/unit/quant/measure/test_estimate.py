"""Estimating costs in nats: what the entries say, what they are computed from, what stops a run."""

import shutil
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_runs import read_factors
from resumed import before
from roundings import make_singular
from stage_runs import one_layer, run_until
from traces import delete, identities

from exl2flow.core.errors import QuantizationError
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import StageFolder
from exl2flow.model import ProjectionSpec, resolve
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure import projection as projection_module
from exl2flow.quant.measure.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS, parse_params
from exl2flow.quant.measure.estimate import HEAD_FILE
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE, projection_bits, read_measurement
from exl2flow.quant.measure.projection import REFERENCE, Projection, results_of
from exl2flow.quant.rounding.error_feedback import RoundingJob, padded_weight, round_matrices
from exl2flow.quant.rounding.hessian import HessianFactor, HessianSum, factor, mixed
from exl2flow.quant.sensitivity.fisher import Factors, OutputFactor, estimate
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.walk.source_model import SourceModel

DAMPING, FISHER_SHARE, OUTPUT_DAMPING = 0.05, 0.5, 0.3  # the defaults


@pytest.fixture
def written(converted: Any) -> dict[str, Any]:
    """The content of a measurement in nats."""
    content: dict[str, Any] = read_json(converted.path("measure") / MEASUREMENT_FILE)
    return content


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model of one layer that is about to be measured."""
    config = one_layer(tmp_path_factory.mktemp("single"), hidden=32, intermediate=64, bpw=4.0)
    return run_until(config, "sensitivity")


def slots_of(converted: Any) -> list[ProjectionSpec]:
    decoder = [p for sublayer in converted.spec.sublayers for p in sublayer.projections]
    return [*decoder, converted.spec.head]


def entry_of(written: dict[str, Any], projection: ProjectionSpec, option: str) -> dict[str, Any]:
    """Return what was measured of a projection with these parameters."""
    wanted = parse_params(option).to_json()
    entries = written["measurement"][projection.key]
    return next(entry for entry in entries if entry[projection.name] == wanted)


def test_every_projection_and_the_head_are_slots(written: dict[str, Any], converted: Any) -> None:
    measured = {name: entries for name, entries in written["measurement"].items() if entries}

    assert list(measured) == [projection.key for projection in slots_of(converted)]
    assert {name for name, entries in written["measurement"].items() if entries is None} == {
        "model.norm.norm",
        "lm_head.linear",
    }
    for projection in slots_of(converted):
        is_head = projection == converted.spec.head
        options = HEAD_OPTIONS if is_head else PROJECTION_OPTIONS
        entries = measured[projection.key]
        for entry, params in zip(entries, options, strict=True):
            assert list(entry) == ["accuracy", "total_bits", "nats", projection.name]
            assert entry[projection.name] == params.to_json()
            assert entry["total_bits"] == projection_bits(projection, params)


def test_file_is_read_back_as_it_was(written: dict[str, Any], converted: Any) -> None:
    found = read_measurement(converted.path("measure") / MEASUREMENT_FILE, converted.spec)

    slots = dict(found.decoder) | {converted.spec.head.key: found.head}
    for name, results in slots.items():
        assert [result.to_json() for result in results] == written["measurement"][name]
    assert len(slots) == len(slots_of(converted))


def test_file_says_what_makes_it_reproducible(written: dict[str, Any], converted: Any) -> None:
    ours = written["exl2flow"]

    assert ours["fingerprint"] == converted.pipeline.refs["measure"].fingerprint
    assert ours["options"]["measure_rows"] == 3
    assert ours["notes"] == []


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_more_bits_cost_fewer_nats(group_size: int, written: dict[str, Any]) -> None:
    for entries in written["measurement"].values():
        name = list(entries[0])[-1] if entries else ""
        course = [
            (entry[name]["bits"][0], entry["nats"], entry["accuracy"])
            for entry in entries or []
            if len(entry[name]["bits"]) == 1 and group_size in entry[name]["group_size"].values()
        ]
        for fewer, more in pairwise(course):
            assert more[0] > fewer[0]
            # one bit more is a quarter of the squared error
            assert 0 < more[1] < 0.6 * fewer[1]
            assert more[2] > fewer[2]


def test_costs_are_those_of_a_model_that_can_be_quantized(written: dict[str, Any]) -> None:
    for entries in written["measurement"].values():
        if entries:
            best, worst = (sorted(entries, key=itemgetter("total_bits"))[i] for i in (-1, 0))
            assert best["nats"] < 1e-3  # eight bits
            assert 0.98 < best["accuracy"] < 1
            assert 1e-4 < worst["nats"] < 10


def dequantized(
    weight: torch.Tensor,
    params: QuantParams,
    item: HessianFactor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    job = RoundingJob(weight=weight, params=params, output=output)
    return next(round_matrices([job], item, search="column")).dequantize().float()


def problem(
    pipeline: Pipeline, index: int, name: str
) -> tuple[ProjectionSpec, torch.Tensor, HessianFactor, Factors]:
    """Return a projection with weight, factor and Fisher factors for states of the source."""
    model = SourceModel.open(pipeline.config, "cpu")
    states = model.initial_states(load_rows(pipeline.path("tokenize"), "measure"))
    for earlier in model.spec.sublayers[:index]:
        states = model.sublayer(earlier)(states)
    sublayer = model.sublayer(model.spec.sublayers[index])
    projection = next(p for p in sublayer.spec.projections if p.name == name)
    total = HessianSum(projection.in_features)
    for row in sublayer.reads(states)[projection.capture]:
        total.add(row)
    factors = read_factors(pipeline.path("sensitivity"), index)[name]
    hessian = mixed(total.mean(), factors.input, FISHER_SHARE)
    item = factor(hessian, damping=DAMPING, name=name)
    return projection, padded_weight(sublayer.linears[name]), item, factors


@pytest.mark.parametrize(
    ("index", "name", "options"),
    [
        (0, "q_proj", ("2 g64", "4 g32")),
        (2, "o_proj", ("3 g64",)),
        (3, "up_proj", ("5 g128",)),
        (3, "down_proj", ("2 g32", "8 g128")),
    ],
)
@torch.inference_mode()
def test_cost_is_that_of_the_error_on_states_of_the_source(
    index: int, name: str, options: tuple[str, ...], written: dict[str, Any], converted: Any
) -> None:
    projection, weight, item, factors = problem(converted.pipeline, index, name)
    output = factors.output.damped(OUTPUT_DAMPING).blocks
    with_metric, without = (
        estimate(
            dequantized(weight, QuantParams.uniform(*REFERENCE), item, metric) - weight, factors
        )
        for metric in (output, None)
    )
    gain = min(1.0, with_metric / without)
    for option in options:
        error = dequantized(weight, parse_params(option), item) - weight

        expected = gain * estimate(error, factors)

        # fp32 sums in another order may move single codes by one
        assert entry_of(written, projection, option)["nats"] == pytest.approx(expected, rel=0.02)
    assert parse_params("3 g128") == QuantParams.uniform(*REFERENCE)
    assert gain < 0.95


@pytest.mark.parametrize(("index", "name"), [(0, "q_proj"), (1, "gate_proj"), (3, "down_proj")])
@torch.inference_mode()
def test_cost_of_a_mixed_matrix_is_about_that_of_rounding_it(
    index: int, name: str, written: dict[str, Any], converted: Any
) -> None:
    projection, weight, item, factors = problem(converted.pipeline, index, name)

    def found(option: str) -> float:
        return float(entry_of(written, projection, option)["nats"])

    def rounded(option: str) -> float:
        return estimate(dequantized(weight, parse_params(option), item) - weight, factors)

    for upper, lower in ((3, 2), (4, 3), (5, 4)):
        gain = found(f"{lower} g32") / rounded(f"{lower} g32")
        mixed_option = f"{upper}/{lower}@0.5/0.5 g32"

        assert found(f"{upper} g32") < found(mixed_option) < found(f"{lower} g32")
        assert found(mixed_option) == pytest.approx(gain * rounded(mixed_option), rel=0.25)


def test_options_of_one_layout_cost_the_same(written: dict[str, Any], converted: Any) -> None:
    """A matrix of 64 rows has one or two groups: shares that give the same are the same."""
    for projection in slots_of(converted):
        k = projection.in_features
        by_layout: dict[object, set[float]] = {}
        for entry in written["measurement"][projection.key]:
            params = QuantParams.from_json(entry[projection.name])
            by_layout.setdefault(params.bands(k), set()).add(entry["nats"])
        assert all(max(costs) <= min(costs) * (1 + 1e-9) for costs in by_layout.values())


@torch.inference_mode()
def test_cost_of_the_head_is_the_divergence_of_its_predictions(
    written: dict[str, Any], converted: Any
) -> None:
    model = SourceModel.open(converted.config, "cpu")
    states = model.initial_states(load_rows(converted.path("tokenize"), "measure"))
    for spec in model.spec.sublayers:
        states = model.sublayer(spec)(states)
    head = model.head()
    total = HessianSum(64)
    for row in head.normed(states):
        total.add(row)
    factors = read_factors(converted.path("sensitivity"), "head")["lm_head"]
    hessian = mixed(total.mean(), factors.input, FISHER_SHARE)
    item = factor(hessian, damping=DAMPING, name="head")
    weight, inputs = padded_weight(head.linear), head.normed(states[:2]).double()
    reference = torch.log_softmax(inputs @ head.linear.weight.double().T, dim=-1)
    for option in ("3 g128", "4 g64", "6 g128"):
        matrix = dequantized(weight, parse_params(option), item).double()[:, :301]
        found = torch.log_softmax(inputs @ matrix, dim=-1)

        expected = float((reference.exp() * (reference - found)).sum(dim=-1).mean())

        entry = entry_of(written, model.spec.head, option)
        assert entry["nats"] == pytest.approx(expected, rel=0.02)


@torch.inference_mode()
def test_without_rounds_no_gain_is_expected(single: Pipeline, tmp_path: Path) -> None:
    plain = single.config.rounding.model_copy(update={"rounds": 0})
    pipeline = before(single, "measure", tmp_path, rounding=plain)
    projection, weight, item, factors = problem(single, 1, "gate_proj")
    error = dequantized(weight, parse_params("3 g32"), item) - weight

    pipeline.run("measure", progress=silent)

    written = read_json(pipeline.path("measure") / MEASUREMENT_FILE)

    entry = entry_of(written, projection, "3 g32")
    assert entry["nats"] == pytest.approx(estimate(error, factors), rel=0.02)


def test_lost_head_is_measured_again_and_nothing_else(converted: Any, tmp_path: Path) -> None:
    pipeline = before(converted.pipeline, "measure", tmp_path)
    folder = pipeline.path("measure")
    shutil.copytree(converted.path("measure"), folder)
    expected = read_json(folder / HEAD_FILE)
    delete(folder / HEAD_FILE)
    intact = identities(folder / "sublayers")

    pipeline.run("measure", progress=silent)

    assert read_json(folder / HEAD_FILE) == expected
    assert len(intact) == 4
    assert intact.items() <= identities(folder / "sublayers").items()
    assert pipeline.is_complete("measure")


def test_hopeless_projection_stops_the_run(
    single: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection_module, "HOPELESS_ERROR", 0.0)
    monkeypatch.setattr(projection_module, "NEGLIGIBLE_NATS", 0.0)

    with pytest.raises(
        QuantizationError, match=r"`model\.layers\.0\.self_attn\.q_proj` .* 0\.\d{3}"
    ):
        before(single, "measure", tmp_path).run("measure", progress=silent)


@pytest.mark.parametrize(
    ("gradient", "matters"), [(1.0, False), (1e12, True), (float("nan"), True)]
)
def test_weights_too_small_to_store_stop_a_run_only_where_they_matter(
    gradient: float, matters: bool, single: Pipeline
) -> None:
    spec = resolve(single.config.source).sublayers[0].projections[0]
    k, n = spec.in_features, spec.out_features
    output = OutputFactor(blocks=gradient * torch.eye(n)[None], columns=n)
    nats = estimate(torch.full((k, n), 1e-7), Factors(input=torch.eye(k), output=output))
    projection = Projection.__new__(Projection)  # its matrix is not needed
    projection.spec = spec

    costs = torch.tensor([nats, 1.0], dtype=torch.float64)[:, None].expand(1, 1, 2, k) / k

    def results() -> int:
        params = QuantParams.uniform(8, 32)
        found = results_of([projection], costs, [(8, 32)], [params], torch.ones(1))
        return len(found[spec.key])

    if not matters:
        assert results() == 1
        return
    with pytest.raises(QuantizationError, match=r"relative error of 1\.000"):
        results()


def test_remedy_is_recorded_and_the_run_goes_on(
    single: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_singular(monkeypatch)

    pipeline = before(single, "measure", tmp_path)
    pipeline.run("measure", progress=silent)

    folder = StageFolder.load(pipeline.path("measure"), pipeline.refs["measure"].fingerprint)
    assert folder is not None
    spec = resolve(single.config.source)
    names = dict.fromkeys(p.reads for sublayer in spec.sublayers for p in sublayer.projections)
    assert len(names) == 4
    expected = [f"{name}: identity Hessian" for name in (*names, "lm_head")]
    assert sorted(folder.manifest.notes) == sorted(expected)
    content = read_json(folder.path / MEASUREMENT_FILE)
    assert content["exl2flow"]["notes"] == sorted(folder.manifest.notes)
