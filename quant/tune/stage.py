"""The tune stage: train codes, scales and norms to say what the source says.

Adam minimizes the KL divergence from the source on rows of the calibration text, and on more rows
that the source wrote to be trained on. Held-out rows judge; the best state on them is written,
which may be the initial one. A run that was killed resumes from its last saved state and gives the
same bytes.
"""

import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from exl2flow.core.errors import ReconstructionMismatch
from exl2flow.core.options.config import ConversionConfig, TrainedOptions, TuneOptions
from exl2flow.core.store.files import write_json, write_tensors
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import tensor_cores
from exl2flow.model import (
    CanonicalTensors,
    ModelSpec,
    ProjectionSpec,
    resolve,
    with_bos,
)
from exl2flow.quant.allocate.budget import decoder_numel
from exl2flow.quant.allocate.layout import plain_tensors
from exl2flow.quant.quantize.stage import (
    HEAD_FILE,
    read_report,
    result_files,
    sublayer_file,
)
from exl2flow.quant.quantize.stored_form import reconstruction_digest
from exl2flow.quant.tokenize.stage import further_rows, judging_texts, training_rows
from exl2flow.quant.training.kept import kept_in
from exl2flow.quant.training.trainable import TrainedLinear
from exl2flow.quant.tune.distill import STEP_TOKENS, Distillation
from exl2flow.quant.tune.tuned_model import LOGIT_BYTES, TunedModel
from exl2flow.quant.walk.needs import FLOAT, HALF, ModelSizes
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import STATE_FILES

Options = TypeVar("Options", bound=TrainedOptions)

log = logging.getLogger(__name__)

PLAIN_FILE = "sublayers/plain.safetensors"  # norms and embedding, fp16, under the source's names
SAVED = 4  # numbers per trained one in a saved state: value, two moments, best value
TUNING_FILE = "tuning.json"  # the judgements


def tuned_files(spec: ModelSpec) -> list[str]:
    """Return the tensor files of a finished `tune` stage: those of `quantize`, and `plain`."""
    return [*result_files(spec), PLAIN_FILE]


def tune_memory(spec: ModelSpec, options: TuneOptions, memory: int | None = None) -> int:
    """Forecast the device memory in bytes that tuning needs, of `memory` of a GPU; None: a CPU.

    The whole source as its files store it, the codes of the whole model, Adam's state, the matrices
    of one sublayer and the head, a step's logits, and the activations.
    """
    tensors = CanonicalTensors(spec)
    sizes = [sum(p.numel for p in s.projections) for s in spec.sublayers]
    head = spec.head.numel
    codes = sum(sizes) + head
    trained = head * bool(options.embedding_rate) + codes * bool(options.code_rate)
    logits = LOGIT_BYTES // FLOAT
    return (
        sum(map(tensors.nbytes, tensors.names))
        + codes
        + 4 * (5 * trained + 3 * (max(sizes) + head) + 4 * logits)
        + kept_in(memory)
    )


def needs(config: TrainedOptions, sizes: ModelSizes) -> Need:
    """Forecast the stage, which trains plain tensors, and codes too if they have a rate.

    Scales are negligible.
    """
    options, spec = config.tune, sizes.spec
    plain = sum(map(math.prod, plain_tensors(spec).values()))
    trained = plain - (0 if options.embedding_rate else spec.vocab_size * spec.hidden_size)
    if options.code_rate:
        trained += decoder_numel(spec) + spec.head.numel
    memory = sizes.card.memory if sizes.card else None
    state, working = SAVED * FLOAT * trained, tune_memory(spec, options, memory)
    return Need(
        memory_bytes=state + (0 if sizes.card else working),
        kept_bytes=sizes.packed + HALF * plain,
        passing_bytes=STATE_FILES * state,
        gpu_memory_bytes=working if sizes.card else 0,
        holds="model",
    )


def tune(run: StageRun[ConversionConfig]) -> None:
    """Tune what `quantize` made; see `train`."""
    source = SourceModel.open(run.config, run.device, gradients=True)
    train(run, source, source, "quantize")


@tensor_cores()
@torch.enable_grad()  # an earlier stage may have left gradients off
def train(run: StageRun[Options], source: SourceModel, own: SourceModel, stage: str) -> None:
    """Write replacements for all files of a stage, and the tuned plain tensors.

    Args:
        run: of `tune`.
        source: what the model should say.
        own: with the norms and the embedding that are trained, and the source's weights.
        stage: that made the matrices.

    Raises:
        NotEnoughRows: the calibration rows hold less than two rows of text.
        ReconstructionMismatch: a packed matrix does not decode to the one that was judged.
    """
    matrices = run.inputs[stage]
    made = [name for name in result_files(own.spec) if (matrices / name).exists()]
    run.folder.manifest.total = run.config.tune.steps
    if not all(map(run.folder.valid, [*made, PLAIN_FILE, TUNING_FILE])):
        model = TunedModel(own, matrices, run.config.tune)
        training, judging = _rows(run)
        work = Distillation(source, model, run.config.tune, training=training, judging=judging)
        distill(run, work)
        work.descent.recall()
        write_results(run, matrices, model, work)
    run.folder.manifest.cursor = run.folder.manifest.total
    run.tick(run.folder.manifest.total, run.folder.manifest.total, "tuned")


def _rows(run: StageRun[Options]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the rows to train on, int64 (rows, t), and by text the ones that only judge."""
    folder, held_out = run.inputs["tokenize"], run.config.held_out
    training, judging = training_rows(folder, held_out), judging_texts(folder, held_out)
    if "compose" in run.inputs:
        aside = len(judging.get("self-written", ()))
        written = further_rows(run.inputs["compose"], run.config)[aside:]
        if run.config.calibration.file:
            training = repeated(training, len(written))
        training = torch.cat([training, with_bos(written, resolve(run.config.source))])
    return training, judging


def repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows (n, t) as often as brings them nearest to `count`, but all of them.

    What a person gave weighs as much as what the model wrote besides.
    """
    return rows.repeat(max(1, round(count / len(rows))), 1)


def distill(run: StageRun[Options], work: Distillation) -> None:
    """Train up to the last step, saving the state from time to time."""
    saved = run.folder.load_states()
    if saved is not None:
        work.restore(*saved)
    elif not work.judges.judgements:
        work.judge()
    run.tick(work.step, run.folder.manifest.total)
    while not work.finished:
        begun = time.monotonic()
        work.advance()
        is_judged = work.judge_when_due()
        is_last = work.finished or run.stop.signum is not None
        if is_last or run.folder.states_are_due():
            run.folder.manifest.cursor = work.step
            run.folder.save_states(work.state(), work.step)
        if is_judged:
            log.info("step=%d %s elapsed=%.1fs", work.step, work.summary, time.monotonic() - begun)
            run.tick(work.step, run.folder.manifest.total, work.summary)
        run.stop_if_asked()


def write_results(
    run: StageRun[Options], matrices: Path, model: TunedModel, work: Distillation
) -> None:
    """Commit the files of all sublayers and the head, the plain tensors, and the judgements."""
    for sublayer in model.sublayers:
        linears = [(p, sublayer.linears[p.name]) for p in sublayer.spec.projections]
        _write_linears(run, matrices, sublayer_file(sublayer.spec), linears)
        run.stop_if_asked()
    if isinstance(model.head, TrainedLinear):
        _write_linears(run, matrices, HEAD_FILE, [(model.spec.head, model.head)])
    plain = model.plain_tensors()
    run.folder.commit(PLAIN_FILE, write_tensors(run.folder.path / PLAIN_FILE, plain))
    sha256 = write_json(run.folder.path / TUNING_FILE, work.report())
    judges = work.judges
    note = f"tuned: {work.summary} ({judges.in_words(judges.best)})"
    refused = judges.refused()
    run.folder.note(f"{note}; {refused}" if refused else note)  # stored with the last commit
    run.folder.commit(TUNING_FILE, sha256)


def _write_linears(
    run: StageRun[Options],
    matrices: Path,
    name: str,
    linears: list[tuple[ProjectionSpec, TrainedLinear]],
) -> None:
    """Write a file like that among the matrices, with its report."""
    report = read_report(matrices / name)
    digests: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for projection, linear in linears:
        packed = linear.export()
        matrix = packed.to(linear.device).dequantize()
        if not torch.equal(matrix[:, : projection.out_features].float(), linear.decode()[0]):
            raise ReconstructionMismatch(
                f"the tuned tensors of `{projection.key}` do not decode to the matrix that was "
                "judged; this is a defect of exl2flow: report it with the model's name"
            )
        digests[projection.name] = reconstruction_digest(matrix)
        tensors |= packed.to_tensors(projection.key)
    renewed = tuple(replace(item, sha256=digests[item.name]) for item in report.matrices)
    metadata = {"report": json.dumps(replace(report, matrices=renewed).to_json())}
    run.folder.commit(name, write_tensors(run.folder.path / name, tensors, metadata=metadata))


def tune_options(config: TrainedOptions) -> dict[str, object]:
    """Return the options that the fingerprint knows."""
    return {"tune": config.tune.model_dump(), "rope": config.rope.model_dump()}


def tune_gpu_options(config: TrainedOptions) -> dict[str, object]:
    """Return the ones that only matter on a GPU."""
    limit = {} if config.max_memory is None else {"max_memory": config.max_memory}
    return {"step_tokens": config.tune.tokens or STEP_TOKENS["cuda"], **limit}


TUNE: Stage[ConversionConfig] = Stage(
    name="tune",
    schema=3,
    inputs=("compose", "tokenize", "quantize"),
    options=tune_options,
    gpu_options=tune_gpu_options,
    run=tune,
    enabled=lambda config: config.tune.steps > 0,
    needs=needs,
    removable=True,
)
