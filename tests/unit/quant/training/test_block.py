"""Trained sublayers: closer to the source's outputs, never farther, and the same after a stop."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversions import small_config
from roundings import to_nearest
from stage_runs import calibrated_on, foreign_measurement, run_until, text_parquet
from tiny import make_tiny
from together import on_all

from exl2flow.core.options.config import ConversionConfig, RoundingOptions
from exl2flow.core.runtime.progress import silent
from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.core.store.files import read_json, read_tensors
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import QuantParams, Sublayer, resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.quantize import matrix_work
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, read_report, result_files, sublayer_file
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    padded_weight,
    round_matrices,
)
from exl2flow.quant.rounding.hessian import MixedHessian, factor
from exl2flow.quant.sensitivity.fisher import OutputFactor
from exl2flow.quant.training import block
from exl2flow.quant.training.block import (
    BlockRows,
    block_bytes,
    corrected_output,
    train_block,
    trains_within,
)
from exl2flow.quant.training.kept import KEPT_BYTES
from exl2flow.quant.walk.deal import Deal
from exl2flow.quant.walk.source_model import SourceModel

COARSE = QuantParams(bit_widths=(3,), proportions=(1.0,), group_sizes=(32,))
ROWS, JUDGING, TOKENS = 24, 4, 32
OPTIONS = RoundingOptions(block_steps=24, block_rate=0.1)


@pytest.fixture(autouse=True, scope="module")
def few_rows_a_step() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(block.STEP_TOKENS, "cpu", 128)
        yield


@pytest.fixture(params=[0, 1], ids=["attention", "mlp"])
def sublayer(request: pytest.FixtureRequest, tmp_path: Path) -> Sublayer:
    """A sublayer with biases and norms of heads."""
    source = make_tiny("qwen3", tmp_path / "model", num_hidden_layers=1, attention_bias=True)
    config = small_config(source, tmp_path / "out")
    model = SourceModel.open(config, "cpu")
    return model.sublayer(model.spec.sublayers[request.param])


def to_nearest_codes(sublayer: Sublayer) -> dict[str, RoundedMatrix]:
    """Round each matrix by itself, without regard to its inputs."""
    found = {}
    for p in sublayer.spec.projections:
        item = factor(MixedHessian.plain(torch.eye(p.in_features)), damping=0.1, name=p.name)
        job = RoundingJob(weight=padded_weight(sublayer.linears[p.name]), params=COARSE)
        (found[p.name],) = round_matrices([job], to_nearest(item), search="column")
    return found


def rows_of(sublayer: Sublayer, metric: OutputFactor | None = None) -> BlockRows:
    """Return correlated random states, of which the last rows judge."""
    hidden = sublayer.norms["before"].weight.shape[0]
    states = torch.randn(ROWS, TOKENS, 8) @ torch.randn(8, hidden)
    texts = {"own": torch.zeros(JUDGING // 2, TOKENS), "other": torch.zeros(JUDGING // 2, TOKENS)}
    return BlockRows(
        device=states.device,
        deal=Deal(ROWS - JUDGING),
        states=states,
        wanted=corrected_output(sublayer, None, 0.0),
        metric=metric,
        texts=texts,
    )


def test_training_lowers_the_error_on_rows_that_it_has_not_seen(sublayer: Sublayer) -> None:
    rounded, rows = to_nearest_codes(sublayer), rows_of(sublayer)
    before = dict(sublayer.linears)

    trained, score = train_block(rounded, sublayer, replace(rows, at_once=3), OPTIONS)

    assert score < 0.95
    assert sublayer.linears == before
    for name, matrix in trained.items():
        assert not torch.equal(matrix.codes, rounded[name].codes)
        assert torch.equal(matrix.scale_codes, rounded[name].scale_codes)
        assert torch.equal(matrix.perm, rounded[name].perm)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_train_what_one_does(sublayer: Sublayer, count: int) -> None:
    rounded, rows = to_nearest_codes(sublayer), rows_of(sublayer)
    options = OPTIONS.model_copy(update={"block_steps": 3})
    alone, score = train_block(rounded, sublayer, rows, options)

    def trained(ranks: WorkRanks) -> tuple[dict[str, RoundedMatrix], float]:
        deal = Deal(ROWS - JUDGING, ranks)
        states = torch.cat([rows.states[list(deal.own)], rows.states[-JUDGING:]])
        own = replace(rows, deal=deal, states=states)
        return train_block(rounded, sublayer, own, options)

    found = on_all(count, trained)

    for matrices, own_score in found:
        assert own_score == score
        for name, matrix in alone.items():
            assert torch.equal(matrices[name].codes, matrix.codes)
            assert torch.equal(matrices[name].max_scales, matrix.max_scales)


def test_training_that_does_not_help_leaves_the_matrices(sublayer: Sublayer) -> None:
    rounded, rows = to_nearest_codes(sublayer), rows_of(sublayer)

    trained, score = train_block(
        rounded, sublayer, rows, OPTIONS.model_copy(update={"block_rate": 1e3})
    )

    assert score == 1.0
    for name, matrix in trained.items():
        assert torch.equal(matrix.codes, rounded[name].codes)
        assert torch.equal(matrix.max_scales, rounded[name].max_scales)


def test_the_metric_and_the_source_s_own_states_decide_what_is_wanted(sublayer: Sublayer) -> None:
    rows = rows_of(sublayer)
    hidden = rows.states.shape[-1]
    blocks = torch.eye(32).repeat(hidden // 32, 1, 1)
    returned = torch.zeros_like(rows.states)

    plain, double = (
        replace(rows, metric=OutputFactor(blocks=scale * blocks, columns=hidden)).errors(
            replace_output(sublayer), [0, 2]
        )
        for scale in (1.0, 2.0)
    )
    same = rows.errors(sublayer, [1])
    halfway = corrected_output(sublayer, returned, 0.5)
    other = replace(rows, wanted=halfway).errors(sublayer, [1])

    torch.testing.assert_close(double, 2 * plain)
    assert float(same) == 0
    assert float(other) == pytest.approx(TOKENS * hidden, rel=1e-4)  # as far as what is wanted


def replace_output(sublayer: Sublayer) -> Sublayer:
    """Return a sublayer that returns what enters it."""

    class Identity(type(sublayer)):  # type: ignore[misc]  # either kind
        def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    identity = object.__new__(Identity)
    identity.__dict__.update(sublayer.__dict__)
    return identity


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ConversionConfig:
    """A conversion that trains sublayers, of a model with experts in one of its layers."""
    root = tmp_path_factory.mktemp("block")
    source = make_tiny("qwen2-moe", root / "model", mlp_only_layers=[0])
    return small_config(
        source,
        root / "out",
        bpw=5.5,
        measurement=foreign_measurement(root / "measurement.json", resolve(source)),
        calibration=calibrated_on(text_parquet(root / "text.parquet"), (12, 64), (1, 64)),
        rounding={"rounds": 1, "sweeps": 1, "block_steps": 2},
    )


@pytest.fixture(scope="module")
def quantized(config: ConversionConfig) -> Pipeline:
    """The same, quantized."""
    return run_until(config, "quantize")


def test_reports_say_what_training_did(quantized: Pipeline) -> None:
    spec, folder = resolve(quantized.config.source), quantized.path("quantize")

    trained = [read_report(folder / sublayer_file(s)).trained for s in spec.sublayers]

    assert any(s.group for s in spec.sublayers)
    assert all(score is not None and score <= 1.0 for score in trained)
    assert read_report(folder / HEAD_FILE).trained is None


def test_what_does_not_fit_stays_as_it_was_rounded(
    quantized: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quantized.config.model_copy(update={"work_root": tmp_path})
    pipeline, spec = Pipeline(config, STAGES, device="cpu"), resolve(config.source)
    for name in ("tokenize", "sensitivity", "allocate"):
        shutil.copytree(quantized.path(name), pipeline.path(name))
    small = [s for s in spec.sublayers if s.group is None]
    monkeypatch.setattr(matrix_work, "trains_within", lambda limit, model, s, tokens: s in small)

    pipeline.run("quantize", progress=silent)

    for s in spec.sublayers:
        trained = read_report(pipeline.path("quantize") / sublayer_file(s)).trained
        assert (trained is not None) == (s in small)
    notes = read_json(pipeline.path("quantize") / "manifest.json")["notes"]
    left = [note for note in notes if note.endswith(": not trained, which takes too much memory")]
    assert len(left) == len(spec.sublayers) - len(small)


def test_memory_decides_what_is_trained_on_a_gpu(config: ConversionConfig) -> None:
    spec = resolve(config.source)
    s = spec.sublayers[0]
    limit = 40 * 10**9

    needed = block_bytes(spec, s, 2048, limit)

    assert needed > 44 * sum(p.numel for p in s.projections)
    assert trains_within(limit, spec, s, 2048)
    assert not trains_within(int(0.5 * KEPT_BYTES), spec, s, 2048)
    assert trains_within(None, spec, s, 2048)


def test_a_run_that_lost_results_makes_them_again(quantized: Pipeline) -> None:
    folder = quantized.path("quantize")
    names = result_files(resolve(quantized.config.source))
    before = {name: (folder / name).read_bytes() for name in names}
    for name in names[2:]:
        (folder / name).unlink()

    quantized.run("quantize", progress=silent)

    assert {name: (folder / name).read_bytes() for name in names} == before
    assert read_tensors(folder / names[0])
