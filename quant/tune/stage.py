"""The tune stage: train codes, scales and norms to say what the source says.

Adam minimizes the KL divergence from the source on rows of the calibration text, and on more rows
that the source wrote to be trained on. Held-out rows judge; the best state on them is written,
which may be the initial one. A run that was killed resumes from its last saved state and gives the
same bytes.
"""

import logging
import math
import time
from pathlib import Path

import torch

from exl2flow.core.options.config import ConversionConfig, TrainedOptions, TuneOptions
from exl2flow.core.store.files import write_json, write_tensors
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import tensor_cores
from exl2flow.model import (
    CanonicalTensors,
    ModelSpec,
    resolve,
    with_bos,
)
from exl2flow.quant.allocate.budget import decoder_numel
from exl2flow.quant.allocate.layout import plain_tensors
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, result_files, sublayer_file
from exl2flow.quant.quantize.stage import JUDGING_ROWS
from exl2flow.quant.tokenize.stage import further_rows, judging_texts, training_rows
from exl2flow.quant.training.kept import kept_in
from exl2flow.quant.training.trainable import TrainedLinear
from exl2flow.quant.tune.distill import STEP_TOKENS, Distillation
from exl2flow.quant.tune.tuned_model import LOGIT_BYTES, TunedModel
from exl2flow.quant.tune.windows import train_windows, window_bytes, windows
from exl2flow.quant.tune.written import TUNING_FILE, Options, write_linears
from exl2flow.quant.walk.needs import FLOAT, HALF, LIBRARIES, ModelSizes
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import STATE_FILES

log = logging.getLogger(__name__)

PLAIN_FILE = "sublayers/plain.safetensors"  # norms and embedding, fp16, under the source's names
SAVED = 4  # numbers per trained one in a saved state: value, two moments, best value


def tuned_files(spec: ModelSpec) -> list[str]:
    """Return the tensor files of a finished `tune` stage: those of `quantize`, and `plain`."""
    return [*result_files(spec), PLAIN_FILE]


def tune_memory(
    spec: ModelSpec, options: TuneOptions, tokens: int, memory: int | None = None
) -> int:
    """Forecast the device memory in bytes that tuning needs, of `memory` of a GPU; None: a CPU.

    That of a window of layers, or: the whole source as its files store it, the codes of the whole
    model, Adam's state, the matrices of one sublayer and the head, a step's logits, and the
    activations.

    Args:
        spec: of the model.
        options: of training.
        tokens: of a row.
        memory: see above.
    """
    if options.layers:
        parts = windows(spec, options.layers)
        return max(window_bytes(spec, window, tokens, memory) for window in parts)
    tensors = CanonicalTensors(spec)
    sizes = [sum(p.numel for p in s.projections) for s in spec.sublayers]
    head = spec.head.numel
    codes = sum(sizes) + head
    trained = head * bool(options.embedding_rate) + codes * bool(options.code_rate)
    logits = LOGIT_BYTES // FLOAT
    return (
        sum(map(tensors.nbytes, tensors.names))
        + codes
        + 4 * (6 * trained + 3 * (max(sizes) + head) + 4 * logits)
        + kept_in(memory)
    )


def needs(config: TrainedOptions, sizes: ModelSizes) -> Need:
    """Forecast the stage, which trains plain tensors, and codes too if they have a rate.

    Scales are negligible.
    """
    options, spec, tokens = config.tune, sizes.spec, config.calibration.row_tokens
    memory = sizes.card.memory if sizes.card else None
    working = tune_memory(spec, options, tokens, memory)
    if options.layers:
        rows = 2 * config.calibration.rows + 3 * JUDGING_ROWS
        states = sizes.token * tokens * rows
        return Need(
            memory_bytes=states + max(states, working),
            kept_bytes=sizes.packed,
            passing_bytes=STATE_FILES * states,
            holds="sublayer",
            pinned_bytes=states if sizes.card else 0,
            gpu_memory_bytes=min(LIBRARIES + working, memory) if memory else 0,
        )
    plain = sum(map(math.prod, plain_tensors(spec).values()))
    trained = plain - (0 if options.embedding_rate else spec.vocab_size * spec.hidden_size)
    if options.code_rate:
        trained += decoder_numel(spec) + spec.head.numel
    state = SAVED * FLOAT * trained
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
    folder, options = run.folder, run.config.tune
    training, judging = _rows(run)
    if any(sublayer.group is not None for sublayer in own.spec.sublayers):
        folder.note("experts were trained in their layers at most, not end to end")
    if options.layers:
        training = training[: run.config.calibration.rows]
        train_windows(run, source, own, stage, training=training, judging=judging)
    elif not all(map(folder.valid, [*_replaced(run, own.spec, stage), PLAIN_FILE, TUNING_FILE])):
        model = TunedModel(own, run.inputs[stage], options)
        work = Distillation(
            source, model, options, training=training, judging=judging, ranks=run.ranks
        )
        distill(run, work)
        work.descent.recall()
        if run.ranks.rank == 0:
            write_results(run, run.inputs[stage], model, work)
    total = folder.manifest.cursor = folder.manifest.total
    run.tick(total, total, "tuned")


def _replaced(run: StageRun[Options], spec: ModelSpec, stage: str) -> list[str]:
    """Return the files of a stage that are there; a head may not be quantized."""
    return [name for name in result_files(spec) if (run.inputs[stage] / name).exists()]


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
    run.folder.manifest.total = work.total
    run.tick(work.step, work.total)
    while not work.finished:
        begun = time.monotonic()
        work.advance()
        run.folder.manifest.total = work.total
        is_judged = work.judge_when_due()
        is_last = work.finished or run.stop.signum is not None
        if run.ranks.rank == 0 and (is_last or run.folder.states_are_due()):
            run.folder.manifest.cursor = work.step
            run.folder.save_states(work.state(), work.step)
        if is_judged:
            log.info("step=%d %s elapsed=%.1fs", work.step, work.summary, time.monotonic() - begun)
            run.tick(work.step, work.total, work.summary)
        run.stop_if_asked()


def write_results(
    run: StageRun[Options], matrices: Path, model: TunedModel, work: Distillation
) -> None:
    """Commit the files of all sublayers and the head, the plain tensors, and the judgements."""
    for sublayer in model.sublayers:
        name, projections = sublayer_file(sublayer.spec), sublayer.spec.projections
        write_linears(run, matrices, name, projections, sublayer.linears)
        run.stop_if_asked()
    if isinstance(model.head, TrainedLinear):
        head = model.spec.head
        write_linears(run, matrices, HEAD_FILE, [head], {head.name: model.head})
    plain = model.plain_tensors()
    run.folder.commit(PLAIN_FILE, write_tensors(run.folder.path / PLAIN_FILE, plain))
    sha256 = write_json(run.folder.path / TUNING_FILE, work.report())
    run.folder.note(work.judges.outcome(f"tuned: {work.summary}"))  # stored with the last commit
    run.folder.commit(TUNING_FILE, sha256)


def tune_options(config: TrainedOptions) -> dict[str, object]:
    """Return the options that the fingerprint knows."""
    return {"tune": config.tune.fingerprinted(), "rope": config.rope.model_dump()}


def tune_gpu_options(config: TrainedOptions) -> dict[str, object]:
    """Return the ones that only matter on a GPU."""
    limit = {} if config.max_memory is None else {"max_memory": config.max_memory}
    return {"step_tokens": config.tune.tokens or STEP_TOKENS["cuda"], **limit}


TUNE: Stage[ConversionConfig] = Stage(
    name="tune",
    schema=5,
    inputs=("compose", "tokenize", "sensitivity", "quantize"),
    options=tune_options,
    gpu_options=tune_gpu_options,
    run=tune,
    enabled=lambda config: config.tune.steps > 0,
    needs=needs,
    removable=True,
    is_dealt=lambda config: True,
)
