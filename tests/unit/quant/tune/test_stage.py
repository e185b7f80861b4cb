"""Tuning: what it improves, that the files hold what was judged, and that it goes on as it was."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoders import build_decoder
from stage_runs import foreign_measurement, text_parquet
from tiny import make_tiny
from traces import contents, truncate

from exl2flow.core.errors import Interrupted, NotEnoughRows
from exl2flow.core.options.config import ConversionConfig, TuneOptions
from exl2flow.core.runtime.progress import Progress, Tick, silent
from exl2flow.core.store import store
from exl2flow.core.store.files import read_json, read_tensors, write_json, write_tensors
from exl2flow.core.store.stage import KINDS_FILE, ROWS_FILE, Pipeline
from exl2flow.model import QuantizedLinear, QuantizedMatrix, resolve
from exl2flow.model.files.weights import TensorFiles
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, read_report, result_files
from exl2flow.quant.quantize.stored_form import reconstruction_digest
from exl2flow.quant.tokenize.stage import rows_apart, split_rows
from exl2flow.quant.tune.distill import Distillation
from exl2flow.quant.tune.stage import (
    PLAIN_FILE,
    TUNE,
    repeated,
    tune_memory,
    tuned_files,
)
from exl2flow.quant.tune.tuned_model import TunedModel
from exl2flow.quant.tune.written import TUNING_FILE
from exl2flow.quant.walk.source_model import SourceModel

LAST = ("tune", "compile", "validate")
UP_TO_TUNE = (*(stage for stage in STAGES if stage.name not in LAST), TUNE)
STEPS = 12
TUNE_OPTIONS = {
    "steps": STEPS,
    "tokens": 32,
    "interval": 4,
    "held_out_rows": 2,
    "norm_rate": 1e-2,
    "scale_rate": 1e-2,
    "embedding_rate": 6e-3,
}


class Crash(Exception):
    """Ends the stage as a kill would."""


def after(step: int, act: Callable[[], None]) -> Progress:
    """Return a sink that acts when the judgement after a step has been reported."""

    def sink(tick: Tick) -> None:
        if (tick.stage, tick.done) == ("tune", step) and tick.detail:
            act()

    return sink


def crash() -> None:
    raise Crash


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model with biases and norms of heads, quantized and not yet tuned."""
    root = tmp_path_factory.mktemp("tune")
    source = make_tiny("qwen3", root / "model", dtype=torch.bfloat16, attention_bias=True)
    config = ConversionConfig(
        source=source,
        out=root / "out",
        quality="exllamav2",  # rounded as coarsely as can be: tuning has more to gain
        bpw=3.7,
        head_bits=3,
        device="cpu",
        measurement=foreign_measurement(root / "measurement.json", resolve(source)),
        calibration={
            "text": text_parquet(root / "text.parquet"),
            "rows": 10,
            "row_tokens": 64,
            "measure_rows": 1,
            "measure_row_tokens": 64,
        },
        tune=TUNE_OPTIONS,
    )
    pipeline = Pipeline(config, UP_TO_TUNE, device="cpu")
    for name in pipeline.stages:
        if name != "tune":
            pipeline.run(name, progress=silent)
    return pipeline


@pytest.fixture(scope="module")
def tuned(quantized: Pipeline) -> Pipeline:
    """The same, tuned without disturbance."""
    quantized.run("tune", progress=silent)
    return quantized


@pytest.fixture
def untuned(quantized: Pipeline, tmp_path: Path) -> Callable[..., Pipeline]:
    """Makes pipelines that are about to tune, with other options if wanted."""

    def make(**options: object) -> Pipeline:
        changes = {"work_root": tmp_path, "tune": TuneOptions(**(TUNE_OPTIONS | options))}
        config = quantized.config.model_copy(update=changes)
        pipeline = Pipeline(config, UP_TO_TUNE, device="cpu")
        for name in pipeline.stages:
            if name != "tune":
                shutil.copytree(quantized.path(name), pipeline.path(name))
        return pipeline

    return make


@pytest.fixture
def work(quantized: Pipeline) -> Distillation:
    """A run of distillation that has not begun."""
    return distillation(quantized, quantized.config.tune)


def distillation(pipeline: Pipeline, options: TuneOptions) -> Distillation:
    source = SourceModel.open(pipeline.config, "cpu")
    training, held_out = split_rows(pipeline.path("tokenize"), options.held_out_rows)
    return Distillation(
        source,
        TunedModel(source, pipeline.path("quantize"), options),
        options,
        training=training,
        judging={"calibration": held_out},
    )


def results(pipeline: Pipeline) -> dict[str, str]:
    files = contents(pipeline.path("tune"))
    return {name: digest for name, digest in files.items() if name != "manifest.json"}


@torch.no_grad()
def divergence(config: ConversionConfig, files: Path, ids: torch.Tensor) -> float:
    """Return the mean KL divergence of the model in a folder of `tune` from its source."""
    spec = resolve(config.source)
    source = build_decoder(spec, TensorFiles(config.source), dtype=torch.float32, device="cpu")
    model = build_decoder(spec, TensorFiles(config.source), dtype=torch.float32, device="cpu")
    plain = {name: tensor.float() for name, tensor in read_tensors(files / PLAIN_FILE).items()}
    model.embedding.weight = plain["model.embed_tokens.weight"]
    object.__setattr__(model.head.final_norm, "weight", plain["model.norm.weight"])
    for sublayer, name in zip([*model.sublayers, None], result_files(spec), strict=True):
        tensors = read_tensors(files / name)
        for p in sublayer.spec.projections if sublayer else (spec.head,):
            matrix = QuantizedMatrix.from_tensors(p.key, tensors)
            linear = QuantizedLinear(
                matrix, out_features=p.out_features, dtype=torch.float32, device="cpu"
            )
            if sublayer is None:
                model.head.linear = linear
            else:
                sublayer.linears[p.name] = linear
        if sublayer is not None:
            for norm in sublayer.spec.norms:
                weight = plain[f"{norm.key}.weight"]
                object.__setattr__(sublayer.norms[norm.role], "weight", weight)
    expected, found = (m.forward(ids).log_softmax(-1) for m in (source, model))
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_divergence_on_held_out_rows_falls(tuned: Pipeline) -> None:
    report = read_json(tuned.path("tune") / TUNING_FILE)

    assert [step for step, _ in report["judgements"]] == [0, 4, 8, 12]
    assert report["best_kl"] < 0.98 * report["first_kl"]
    assert report["best_kl"] == min(kl for _, kl in report["judgements"])


def test_files_decode_to_what_was_judged(tuned: Pipeline) -> None:
    _, held_out = split_rows(tuned.path("tokenize"), 2)
    report = read_json(tuned.path("tune") / TUNING_FILE)

    found = divergence(tuned.config, tuned.path("tune"), held_out)

    judged = report["texts"]["calibration"]["best_kl"]
    assert found == pytest.approx(judged, rel=1e-4)  # sums in fp32, in another order


def test_sizes_permutations_and_scale_codes_stay(tuned: Pipeline) -> None:
    spec = resolve(tuned.config.source)
    moved = set()

    for name in result_files(spec):
        before, after = (read_tensors(tuned.path(s) / name) for s in ("quantize", "tune"))
        assert list(before) == list(after)
        assert [(t.dtype, t.shape) for t in before.values()] == [
            (t.dtype, t.shape) for t in after.values()
        ]
        moved |= {n.rpartition(".")[2] for n in before if not torch.equal(before[n], after[n])}

    assert {"bias", "q_scale_max"} <= moved <= {"bias", "q_scale_max", "q_weight"}


def test_norms_and_embedding_are_written_as_fp16_and_moved(tuned: Pipeline) -> None:
    source = TensorFiles(tuned.config.source)

    plain = read_tensors(tuned.path("tune") / PLAIN_FILE)

    assert len(plain) == 2 + 4 * 2  # embedding and final norm, four norms per layer
    for name, tensor in plain.items():
        assert tensor.dtype == torch.float16
        assert tensor.shape == source.read(name).shape
        assert not torch.equal(tensor, source.read(name).half())


def test_reports_hold_the_digests_of_the_new_reconstructions(tuned: Pipeline) -> None:
    for name in result_files(resolve(tuned.config.source)):
        tensors = read_tensors(tuned.path("tune") / name)
        old, new = (read_report(tuned.path(s) / name) for s in ("quantize", "tune"))
        digests = {item.name: item.sha256 for item in new.matrices}

        assert replace(new, matrices=old.matrices) == old
        for key in {tensor.rpartition(".")[0] for tensor in tensors}:
            matrix = QuantizedMatrix.from_tensors(key, tensors)
            assert digests[key.rpartition(".")[2]] == reconstruction_digest(matrix.dequantize())


def test_trained_codes_are_packed_as_they_were_judged(
    quantized: Pipeline, untuned: Callable[..., Pipeline]
) -> None:
    pipeline = untuned(code_rate=0.3, steps=2, interval=1)
    work = distillation(pipeline, pipeline.config.tune)
    assert work.model.head.codes_moved is not None
    start = work.model.head.export()

    work.judge()
    work.advance()
    work.advance()

    made = work.model.head.export()
    share = float((made.packed != start.packed).float().mean())
    assert share > 0.1
    matrix = made.dequantize(torch.float32)
    assert torch.equal(matrix[:, :301], work.model.head.decode()[0])
    assert not matrix[:, 301:].any()


def test_tuning_that_does_not_help_leaves_the_model_as_it_was(
    untuned: Callable[..., Pipeline],
) -> None:
    pipeline = untuned(norm_rate=100.0, patience=1)

    pipeline.run("tune", progress=silent)

    report = read_json(pipeline.path("tune") / TUNING_FILE)
    assert (report["best_step"], report["steps"]) == (0, 4)
    found, before = contents(pipeline.path("tune")), contents(pipeline.path("quantize"))
    names = result_files(resolve(pipeline.config.source))
    assert {n: found[n] for n in names} == {n: before[n] for n in names}
    source = TensorFiles(pipeline.config.source)
    for name, tensor in read_tensors(pipeline.path("tune") / PLAIN_FILE).items():
        assert torch.equal(tensor, source.read(name).half())


@pytest.mark.parametrize(
    ("act", "error", "step"), [(crash, Crash, 4), (interrupt, Interrupted, 12)]
)
def test_a_resumed_run_gives_the_same_bytes(
    tuned: Pipeline,
    untuned: Callable[..., Pipeline],
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], None],
    error: type[Exception],
    step: int,
) -> None:
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", 0.0)
    steps: list[int] = []
    advance = Distillation.advance

    def recording(work: Distillation) -> None:
        steps.append(work.step)
        advance(work)

    monkeypatch.setattr(Distillation, "advance", recording)
    pipeline = untuned()
    with pytest.raises(error):
        pipeline.run("tune", progress=after(step, act))

    pipeline.run("tune", progress=silent)

    assert steps == list(range(STEPS))
    assert results(pipeline) == results(tuned)


def test_training_in_vain_is_tried_again_with_smaller_steps(
    untuned: Callable[..., Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "STATES_INTERVAL_SECONDS", 0.0)
    made = []
    for disturbed in (False, True):
        pipeline = untuned(code_rate=0.5, tokens=128)
        if disturbed:
            with pytest.raises(Crash):
                pipeline.run("tune", progress=after(STEPS + 4, crash))
        pipeline.run("tune", progress=silent)
        made.append(results(pipeline))
        report = read_json(pipeline.path("tune") / TUNING_FILE)
        shutil.rmtree(tmp_path)

    first = report["first_kl"]
    steps, found = zip(*report["judgements"], strict=True)
    assert steps == (0, 4, 8, 12, 16, 20, 24)
    assert min(found[1:4]) > first > min(found[4:]) == report["best_kl"]
    assert report["best_step"] > STEPS
    assert made[0] == made[1]


def test_a_kill_after_the_last_result_keeps_the_note(
    tuned: Pipeline, untuned: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = untuned()
    with monkeypatch.context() as patch:
        patch.setattr(store.StageFolder, "complete", lambda folder: crash())
        with pytest.raises(Crash):
            pipeline.run("tune", progress=silent)

    pipeline.run("tune", progress=silent)

    wanted = read_json(tuned.path("tune") / "manifest.json")["notes"]
    assert len(wanted) == 1
    assert read_json(pipeline.path("tune") / "manifest.json")["notes"] == wanted


def test_a_damaged_file_is_made_again(tuned: Pipeline, untuned: Callable[..., Pipeline]) -> None:
    pipeline = untuned()
    shutil.copytree(tuned.path("tune"), pipeline.path("tune"))
    truncate(pipeline.path("tune") / HEAD_FILE)

    pipeline.run("tune", progress=silent)

    assert results(pipeline) == results(tuned)


def test_without_steps_there_is_no_such_stage(quantized: Pipeline) -> None:
    config = quantized.config.model_copy(update={"tune": TuneOptions()})

    assert "tune" in quantized.stages
    assert "tune" not in Pipeline(config, UP_TO_TUNE, device="cpu").stages


def test_result_files_are_listed(tuned: Pipeline) -> None:
    names = tuned_files(resolve(tuned.config.source))

    assert {*names, TUNING_FILE} == set(results(tuned))
    assert PLAIN_FILE in names


def test_checkpointed_gradients_are_those_of_kept_activations(work: Distillation) -> None:
    ids = work.training[work.order(0)]
    target = work.reference.hidden(ids)[0]
    gradients = []

    for checkpointed in (False, True):
        hidden = work.model.hidden(ids, checkpointed=checkpointed)[0]
        loss = work.model.divergence(hidden, work.reference.head, target)
        gradients.append(torch.autograd.grad(loss, work.descent.values))

    for kept, again in zip(*gradients, strict=True):
        assert torch.equal(kept, again)


def test_held_out_rows_are_spread_over_the_text(tmp_path: Path) -> None:
    kinds = ["web"] * 2 + ["code"] * 4 + ["random"] * 2 + ["stories"] * 2 + ["noise"]
    ids = torch.arange(len(kinds))[:, None].expand(-1, 3).contiguous()
    write_json(tmp_path / KINDS_FILE, {"quantize": {"kinds": kinds}})
    write_tensors(tmp_path / ROWS_FILE, {"quantize": ids})

    training, held_out = split_rows(tmp_path, 2)

    assert held_out[:, 0].tolist() == [2, 8]
    assert training[:, 0].tolist() == [0, 1, 3, 4, 5, 9]
    assert len(split_rows(tmp_path, 100)[1]) == 4


def test_rows_that_share_text_with_a_judge_are_left_out() -> None:
    text = torch.arange(1000)
    held_out = text[200:300][None]
    training = torch.stack([text[i : i + 100] for i in (0, 101, 137, 250, 263, 300, 500)])

    found = rows_apart(training, held_out)

    assert found[:, 0].tolist() == [0, 101, 300, 500]  # 137 and 263 share 37 tokens
    assert torch.equal(rows_apart(held_out, held_out), held_out)


@pytest.mark.parametrize(("count", "copies"), [(0, 1), (4, 1), (5, 2), (30, 10)])
def test_text_that_a_person_gave_weighs_as_much_as_what_the_model_wrote(
    count: int, copies: int
) -> None:
    rows = torch.arange(12).view(3, 4)

    assert torch.equal(repeated(rows, count), torch.cat([rows] * copies))


def test_a_single_row_of_text_is_too_few(tmp_path: Path) -> None:
    write_json(tmp_path / KINDS_FILE, {"quantize": {"kinds": ["web", "random"]}})
    write_tensors(tmp_path / ROWS_FILE, {"quantize": torch.zeros(2, 3, dtype=torch.int64)})

    with pytest.raises(NotEnoughRows, match="the calibration rows have 1; raise `--rows`"):
        split_rows(tmp_path, 1)


def test_memory_covers_the_source_and_grows_with_what_is_trained(quantized: Pipeline) -> None:
    spec = resolve(quantized.config.source)
    weights = sum(p.in_features * p.out_features for s in spec.sublayers for p in s.projections)

    plain, codes = (tune_memory(spec, TuneOptions(code_rate=rate), 64) for rate in (0, 0.01))

    assert plain > 5 * weights
    assert codes - plain >= 20 * weights
