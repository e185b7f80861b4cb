"""Corrected targets: what they are, when they are taken, and that a resume makes the same bytes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import SIGMAS, error, near, terms_of
from conversions import small_config
from resumed import Crash, after, before, crash, results
from stage_runs import calibrated_on, foreign_measurement, run_until, text_parquet
from tiny import make_tiny
from traces import delete

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import silent
from exl2flow.core.store import store
from exl2flow.core.store.files import read_tensors
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import Linear, QuantizedLinear, QuantizedMatrix, Sublayer, resolve
from exl2flow.quant.quantize.correction import (
    Correction,
    CrossProducts,
    moved,
    output_errors,
    paired_rows,
)
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, result_files, sublayer_file
from exl2flow.quant.rounding.hessian import collect_hessians
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.walk.deal import Deal, Pairs
from exl2flow.quant.walk.source_model import SourceModel

HIDDEN = 64
DAMPING = 0.05
STATES = 192  # tokens per row, more than there are in-features
STOP_AFTER = 3
BITS = 3.8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """A conversion to few bits that need not measure, and with biases."""
    folder = tmp_path_factory.mktemp("correction")
    source = make_tiny("qwen2", folder / "model", num_hidden_layers=2)
    calibration = calibrated_on(text_parquet(folder / "text.parquet"), (16, 64), (1, 32))
    return small_config(
        source,
        folder / "out",
        bpw=BITS,
        calibration=calibration,
        measurement=foreign_measurement(folder / "measurement.json", resolve(source)),
        sensitivity={"kind": "error"},
        work_root=folder / "work",
    )


def config_of(base: ConversionConfig, strength: float, **values: object) -> ConversionConfig:
    rounding = base.rounding.model_copy(update={"correction": strength})
    return base.model_copy(update={"rounding": rounding, **values})


@pytest.fixture(scope="module")
def plain(base: ConversionConfig) -> Pipeline:
    """Quantized without correction."""
    return run_until(config_of(base, 0.0), "quantize")


@pytest.fixture(scope="module")
def corrected(base: ConversionConfig, plain: Pipeline) -> Pipeline:
    """Quantized with full correction, after the same earlier stages."""
    return run_until(config_of(base, 1.0), "quantize")


@pytest.fixture(params=[0, 1], ids=["attention", "mlp"])
def sublayer(request: pytest.FixtureRequest, base: ConversionConfig) -> Sublayer:
    model = SourceModel.open(base, "cpu")
    return model.sublayer(model.spec.sublayers[request.param])


@pytest.fixture
def states() -> tuple[torch.Tensor, torch.Tensor]:
    """States of three rows in the quantized model and in the source."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(3, STATES, HIDDEN, generator=generator)
    return source + 0.3 * torch.randn(source.shape, generator=generator), source


def inputs(sublayer: Sublayer, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return capture name → what is read of all rows, fp64 (rows · t, k)."""
    return {capture: x.flatten(0, 1).double() for capture, x in sublayer.reads(states).items()}


def error_of(sublayer: Sublayer, states: torch.Tensor, outputs: torch.Tensor) -> float:
    """Return the error of the outputs of a sublayer that is corrected as a whole."""
    return output_errors(sublayer, states, [{"": row[None]} for row in outputs])[""]


def paired(rows: range, count: int) -> Pairs:
    return Pairs(rows, Deal(count, is_whole=True))


def targets_of(
    sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor], *, strength: float
) -> dict[str, Linear]:
    """Return the targets of the first row: it alone makes them."""
    quantized, source = (x[:1].clone() for x in states)
    sums = CrossProducts(sublayer, source, paired(range(1), 1))
    hessians, _ = collect_hessians(sublayer, quantized, observe=sums)
    crosses = sums.means()
    correction = Correction(strength=strength, damping=DAMPING)
    return {
        p.name: moved(
            sublayer.linears[p.name],
            correction.move(hessians[p.capture], crosses[p.capture], name=p.reads),
        )
        for p in sublayer.spec.projections
    }


def equal(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return found is None if expected is None else torch.equal(found, expected)


def test_targets_are_those_of_damped_least_squares(
    sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    targets = targets_of(sublayer, states, strength=1.0)

    quantized, source = (inputs(sublayer, x[:1]) for x in states)
    for p in sublayer.spec.projections:
        x, wanted = quantized[p.capture], source[p.capture]
        weight = sublayer.linears[p.name].weight.T.double()  # (k, n)
        # rows that hold each weight where it was, as strongly as the damping of the whole sum
        held = (DAMPING * x.square().sum(0).mean()).sqrt() * torch.eye(len(weight)).double()
        expected = torch.linalg.lstsq(
            torch.cat([x, held]), torch.cat([wanted @ weight, held @ weight])
        ).solution
        size = float((expected - weight).square().mean().sqrt())
        matrix = x.T @ x + held.square()
        most = SIGMAS * error(len(x), 2 * len(weight)) * float(torch.linalg.cond(matrix)) * size
        bound = near(weight, 1)
        bound["atol"] += most
        torch.testing.assert_close(targets[p.name].weight.T.double(), expected, **bound)
        assert float((expected - weight).norm() / weight.norm()) > 0.02
        assert equal(targets[p.name].bias, sublayer.linears[p.name].bias)


def test_strength_is_the_part_of_the_way_that_is_gone(
    sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    none, some, full = (targets_of(sublayer, states, strength=x) for x in (0.0, 0.3, 1.0))

    for name, linear in sublayer.linears.items():
        assert torch.equal(none[name].weight, linear.weight)
        torch.testing.assert_close(
            some[name].weight - linear.weight, 0.3 * (full[name].weight - linear.weight)
        )


def test_equal_states_need_no_correction(
    sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    targets = targets_of(sublayer, (states[1], states[1]), strength=1.0)

    for name, linear in sublayer.linears.items():
        assert torch.equal(targets[name].weight, linear.weight)


def test_targets_bring_outputs_nearer_to_the_sources(
    sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    quantized, source = (x[:1] for x in states)
    outputs = sublayer(source)
    before = error_of(sublayer, quantized, outputs)
    targets = targets_of(sublayer, states, strength=1.0)

    sublayer.linears.update(targets)

    assert error_of(sublayer, quantized, outputs) < before


@pytest.mark.parametrize(("rows", "step", "pairs"), [(1, 1, 1), (40, 1, 40), (115, 3, 39)])
def test_source_runs_beside_some_rows_only(rows: int, step: int, pairs: int) -> None:
    found = paired_rows(rows)

    assert (len(found), found.step) == (pairs, step)


def test_rows_that_judge_are_not_fitted(
    base: ConversionConfig, sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    source = states[1][::2].clone()
    sums = CrossProducts(sublayer, source, paired(range(0, 3, 2), 3))

    collect_hessians(sublayer, states[0], observe=sums)

    quantized, wanted = (inputs(sublayer, x[2:]) for x in states)  # the first pair judges
    for capture, found in sums.means().items():
        expected = quantized[capture].T @ (wanted[capture] - quantized[capture])
        bound = near(expected, terms_of(resolve(base.source), STATES), STATES)
        torch.testing.assert_close(found.double(), expected, **bound)
    torch.testing.assert_close(source, sublayer(states[1][::2]))


def test_error_of_outputs_is_relative_and_the_mean_over_rows(
    sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    quantized, source = states

    found = error_of(sublayer, quantized, source)

    missed = sublayer(quantized) - source
    expected = missed.flatten(1).norm(dim=1) / source.flatten(1).norm(dim=1)
    assert found == pytest.approx(float(expected.mean()), rel=1e-5)


def test_a_correction_that_moves_nothing_gives_the_bytes_of_none(
    base: ConversionConfig, plain: Pipeline, tmp_path: Path
) -> None:
    least = before(
        plain, "quantize", tmp_path, rounding=config_of(base, 1e-30).rounding
    )  # below a weight's last bit

    least.run("quantize", progress=silent)

    assert results(least, "quantize") == results(plain, "quantize")


def test_a_correction_that_does_harm_is_not_taken(
    corrected: Pipeline, plain: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubling(correction: Correction, hessian: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.eye(len(hessian))

    monkeypatch.setattr(Correction, "move", doubling)
    harmed = before(corrected, "quantize", tmp_path)

    harmed.run("quantize", progress=silent)

    assert (
        results(harmed, "quantize") == results(plain, "quantize") != results(corrected, "quantize")
    )


def install(sublayer: Sublayer, path: Path) -> None:
    tensors = read_tensors(path / sublayer_file(sublayer.spec))
    for p in sublayer.spec.projections:
        sublayer.linears[p.name] = QuantizedLinear(
            QuantizedMatrix.from_tensors(p.key, tensors),
            out_features=p.out_features,
            dtype=torch.float32,
            device="cpu",
        )


@torch.inference_mode()
def test_corrected_sublayers_end_nearer_to_the_source_than_plain_ones(
    corrected: Pipeline, plain: Pipeline
) -> None:
    """The first one has nothing to make up for and is the same; errors after it are not."""
    model = SourceModel.open(corrected.config, "cpu")
    errors = []
    for pipeline in (plain, corrected):
        source = model.initial_states(load_rows(pipeline.path("tokenize"), "quantize"))
        quantized = source.clone()
        errors.append([])
        for spec in model.spec.sublayers:
            sublayer = model.sublayer(spec)
            source = sublayer(source)
            install(sublayer, pipeline.path("quantize"))
            errors[-1].append(error_of(sublayer, quantized, source))
            quantized = sublayer(quantized)

    first = sublayer_file(model.spec.sublayers[0])
    assert results(corrected, "quantize")[first] == results(plain, "quantize")[first]
    assert errors[1][-1] < 0.97 * errors[0][-1]


@pytest.mark.parametrize("interval", [0.0, 3600.0], ids=["from saved states", "from the start"])
def test_a_resume_with_correction_makes_the_same_bytes(
    interval: float, corrected: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", interval)
    pipeline = before(corrected, "quantize", tmp_path)
    with pytest.raises(Crash):
        pipeline.run("quantize", progress=after("quantize", STOP_AFTER, crash))
    saved = list(pipeline.path("quantize").glob("states-?.safetensors"))
    assert {len(read_tensors(path)["states"]) for path in saved} == ({32} if saved else set())
    assert bool(saved) == (interval == 0)

    pipeline.run("quantize", progress=silent)

    assert results(pipeline, "quantize") == results(corrected, "quantize")


@pytest.mark.parametrize("lost", [1, -1], ids=["a sublayer", "the head"])
def test_a_lost_file_is_made_again_with_the_same_bytes(
    lost: int, corrected: Pipeline, tmp_path: Path
) -> None:
    pipeline = before(corrected, "quantize", tmp_path)
    shutil.copytree(corrected.path("quantize"), pipeline.path("quantize"))
    name = result_files(resolve(corrected.config.source))[lost]
    assert (name == HEAD_FILE) == (lost == -1)
    delete(pipeline.path("quantize") / name)

    pipeline.run("quantize", progress=silent)

    assert results(pipeline, "quantize") == results(corrected, "quantize")


def test_inputs_that_are_dead_leave_the_weights_as_they_are(sublayer: Sublayer) -> None:
    nothing = torch.zeros(2, STATES, HIDDEN)

    targets = targets_of(sublayer, (nothing, nothing), strength=1.0)

    for name, linear in sublayer.linears.items():
        assert torch.equal(targets[name].weight, linear.weight)


def test_a_hessian_without_a_factor_leaves_the_weights_and_says_so(
    sublayer: Sublayer, states: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """So it is with a negative eigenvalue, as rounding of large sums makes it."""
    quantized, source = (x[:1].clone() for x in states)
    crosses = CrossProducts(sublayer, source, paired(range(1), 1))
    hessians, _ = collect_hessians(sublayer, quantized, observe=crosses)
    hessians["input"] -= 2 * torch.diag(hessians["input"].diagonal())
    notes: list[str] = []
    correction = Correction(strength=1.0, damping=1e-9, note=notes.append)

    targets = correction.sublayer_targets(sublayer, quantized, hessians, crosses)

    (first, *_) = read = sublayer.spec.reading("input")
    assert notes == [f"{first.reads}: no correction, the damped Hessian has no Cholesky factor"]
    for p in read:
        assert torch.equal(targets[p.name].weight, sublayer.linears[p.name].weight)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])  # changes exponents only
def test_least_damping_is_relative_to_the_hessian(scale: float) -> None:
    """A Hessian of 4 tokens for 64 inputs has a factor by its damping alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator)
    hessian = x.T @ x

    plain = Correction(strength=1.0, damping=0.0).move(hessian, hessian, name="x")
    scaled = Correction(strength=1.0, damping=0.0).move(scale * hessian, scale * hessian, name="x")

    assert plain is not None
    assert scaled is not None
    torch.testing.assert_close(scaled, plain)


def test_a_large_correction_is_solved_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 24, generator=generator)
    hessian, cross = x.T @ x / 64, torch.randn(24, 24, generator=generator)
    correction = Correction(strength=0.5, damping=0.01)
    whole = correction.move(hessian, cross.clone(), name="x")

    monkeypatch.setattr("exl2flow.quant.quantize.correction.SOLVED_TOGETHER", 20 * 24)
    pieces = correction.move(hessian, cross.clone(), name="x")

    torch.testing.assert_close(pieces, whole)
