"""Train a few layers at a time, where the whole model does not fit.

States of the source and of the quantized model walk through the layers. The codes and scales of a
window of layers are trained together, so that what leaves it is what leaves it in the source. Rows
that judge walk through the matrices as they were, too: in the end, the KL divergence from the
source on them decides whether anything is taken.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from exl2flow.core.runtime.interrupt import look
from exl2flow.core.runtime.memory import limit_of
from exl2flow.core.store.files import read_json, read_tensors, write_json
from exl2flow.core.store.stage import StageRun
from exl2flow.model import Head, ModelSpec, Sublayer, SublayerSpec
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.model.layers.experts import entering
from exl2flow.quant.quantize.matrix_work import HEAD_FILE, result_files, sublayer_file
from exl2flow.quant.quantize.stored_form import as_stored, install
from exl2flow.quant.sensitivity.fisher import OutputFactor
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.training.block import (
    BlockRows,
    Texts,
    block_bytes,
    output_metric_of,
    row_bytes,
    train,
)
from exl2flow.quant.training.judges import Judges
from exl2flow.quant.training.kept import kept_in
from exl2flow.quant.training.trainable import Rates
from exl2flow.quant.tune.tuned_model import TunedSublayer
from exl2flow.quant.tune.written import TUNING_FILE, Options, copy_file, write_linears
from exl2flow.quant.walk.deal import Deal
from exl2flow.quant.walk.divergence import row_divergences
from exl2flow.quant.walk.needs import FLOAT
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import advance, save_here

Window = Sequence[SublayerSpec]

log = logging.getLogger(__name__)

FIXED_WEIGHT = 10  # bytes: source, codes, one expert decoded


def windows(spec: ModelSpec, layers: int) -> list[Window]:
    """Return the sublayers of as many layers at a time, in order."""
    found = [[*group] for _, group in groupby(spec.sublayers, key=lambda s: s.layer_index)]
    return [
        [sublayer for layer in found[begin : begin + layers] for sublayer in layer]
        for begin in range(0, len(found), layers)
    ]


def window_bytes(spec: ModelSpec, window: Window, tokens: int, memory: int | None = None) -> int:
    """Forecast the bytes that training a window needs, of `memory` of a GPU; None: a CPU.

    Of activations, those of one sublayer exist at a time, and the states between sublayers.
    """
    kept = kept_in(memory)
    between = FLOAT * tokens * spec.hidden_size * len(window)
    fixed = sum(p.numel for s in window if s.group is not None for p in s.projections)
    trained = sum(block_bytes(spec, s, tokens, memory) - kept for s in window if s.group is None)
    return kept + between + FIXED_WEIGHT * fixed + trained


class _Chain:
    """Sublayers called like one; for the backward pass, only states between them are kept."""

    def __init__(self, sublayers: Sequence[TunedSublayer], hidden_size: int) -> None:
        self.sublayers, self.hidden_size = sublayers, hidden_size

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to those after the last sublayer, (b, t, hidden)."""
        for sublayer in self.sublayers:
            look()
            hidden = entering(hidden, sublayer.spec, self.hidden_size)
            hidden = checkpoint(sublayer, hidden, use_reentrant=False, preserve_rng_state=False)
        return hidden[..., : self.hidden_size]

    def settled(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states: windows end where layers do."""
        return states


class Windows:
    """The walk: three groups of states between windows, and what happens in each window.

    Groups: states of the source, fp32 (rows, t, hidden); of the model with trained matrices; of the
    rows that judge, which come last, with the matrices as they were.
    """

    def __init__(
        self,
        run: StageRun[Options],
        source: SourceModel,
        own: SourceModel,
        matrices: Path,
        *,
        training: torch.Tensor,
        judging: Texts,
    ) -> None:
        """Begin.

        Args:
            run: the stage.
            source: what the model should say.
            own: the model with the source's weights.
            matrices: folder of the quantized ones.
            training: rows to train on, int64 (rows, t).
            judging: text → rows that only judge, int64 (rows, t).
        """
        # a window takes all of a GPU that it may, so states are in main memory
        self.source, self.own = (replace(model, keeps_states=False) for model in (source, own))
        self.run, self.matrices = run, matrices
        self.texts, self.judges = judging, Judges(judging)
        self.deal, count = Deal(len(training), run.ranks), len(self.judges.rows)
        self.walked = len(training) + count
        self.here = [*self.deal.own, *range(len(training), self.walked)]  # rows of this rank
        self.rows = torch.cat([training, self.judges.rows])[self.here]
        factors = run.inputs.get("sensitivity")
        self.factors = factors and FactorFiles(factors, source.device)

    def walk(self) -> Judges:
        """Train all windows, and return the divergence of the whole model before and after."""
        run, folder = self.run, self.run.folder
        parts = windows(self.own.spec, run.config.tune.layers or 1)
        folder.manifest.total = len(parts)
        start, states = self._begun([*map(self.is_done, parts)])
        run.tick(start, len(parts))
        for index in range(start, len(parts)):
            states, detail = self._through(parts[index], states)
            run.tick(index + 1, len(parts), detail)
            save_here(run, states, index + 1, torch.cat, [self.here, self.here, None])
        source, own, before = states
        count, reference, head = len(before), self.source.head(), self._head()
        for found in (before, own[-count:]):
            rows = row_divergences(reference, source[-count:], head, found)
            self.judges.judgements.append(rows)
        return self.judges

    def is_done(self, window: Window) -> bool:
        """Return whether the trained matrices of some sublayers are stored."""
        return all(self.run.folder.valid(sublayer_file(spec)) for spec in window)

    def _begun(self, done: Sequence[bool]) -> tuple[int, list[torch.Tensor]]:
        """Return the window to begin with, and the states that enter it."""
        count = len(self.judges.rows)
        saved = self.run.folder.load_states()
        if saved is not None and all(done[: saved[0]]):
            source, own, before = torch.split(saved[1], [self.walked, self.walked, count])
            groups = source[self.here], own[self.here], before
            return saved[0], [self.own.placed(group) for group in groups]
        own = self.own.initial_states(self.rows)
        return 0, [self.source.initial_states(self.rows), own, own[-count:].clone()]

    def _through(
        self, window: Window, states: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], str]:
        """Return the states behind a window, after it has been trained, and what became of it."""
        begun = time.monotonic()
        source, own, before = states
        source = self._advanced(self.source, window, source, None)
        detail = f"layers {window[0].layer_index} to {window[-1].layer_index}"
        if not self.is_done(window):
            score = self._train(window, own, source)
            detail = f"{detail}: error {score:.3f} of before"
            log.info("%s elapsed=%.1fs", detail, time.monotonic() - begun)
        own = self._advanced(self.own, window, own, self.run.folder.path)
        return [source, own, self._advanced(self.own, window, before, self.matrices)], detail

    def _advanced(
        self, model: SourceModel, window: Window, states: torch.Tensor, files: Path | None
    ) -> torch.Tensor:
        """Return states behind a window, with the matrices in a folder or the model's own."""
        for spec in window:
            sublayer, states = model.sublayer(spec), model.entering(states, spec)
            if files is not None:
                tensors = read_tensors(files / sublayer_file(spec))
                for p in spec.projections:
                    matrix = QuantizedMatrix.from_tensors(p.key, tensors)
                    install(sublayer, p, matrix.to(model.device))
            advance(sublayer, states)
        return model.entering(states, None)

    def _train(self, window: Window, own: torch.Tensor, returned: torch.Tensor) -> float:
        """Train a window on the states that enter it, and commit its files.

        Returns:
            The error on the rows that judge over the one before.
        """
        options = self.run.config.tune
        code = options.code_rate / math.sqrt(options.steps)
        rates = Rates(scale=options.scale_rate, norm=0.0, code=code)
        trained = [TunedSublayer(self.own, spec, rates, self.matrices) for spec in window]
        linears = [each for s in trained if s.spec.group is None for each in s.linears.values()]
        spec, device, tokens = self.own.spec, self.own.device, self.rows.shape[1]
        limit = limit_of(device) if device.type == "cuda" else None
        row = max(row_bytes(spec, sublayer, tokens) for sublayer in window)
        rows = BlockRows(
            device=device,
            deal=self.deal,
            states=own,
            wanted=lambda hidden, places: returned[places].to(device),
            metric=self._metric(trained[-1].built),
            texts=self.texts,
            at_once=max(1, kept_in(limit) // row),
        )
        block = _Chain(trained, spec.hidden_size)
        judges = train(block, linears, rows, options.steps, tokens=options.tokens)
        for sublayer in trained if self.run.ranks.rank == 0 else ():
            name, projections = sublayer_file(sublayer.spec), sublayer.spec.projections
            write_linears(self.run, self.matrices, name, projections, sublayer.linears)
        self.run.settle({*map(sublayer_file, window)})  # all read them
        return judges.scores()[judges.best]

    def _metric(self, last: Sublayer) -> OutputFactor | None:
        """Return the metric of errors behind a window, given its last sublayer."""
        factors = self.factors.read(last.spec.index) if self.factors else {}
        damping = self.run.config.rounding.output_damping
        outputs = [
            factors[p.name].output.damped(damping)
            for p in last.spec.projections
            if p.is_last and p.name in factors
        ]
        return output_metric_of(last, outputs)

    def _head(self) -> Head:
        """Return the head as it is quantized, or the model's own if it is not."""
        head, path = self.own.head(), self.matrices / HEAD_FILE
        if not path.exists():
            return head
        projection = self.own.spec.head
        matrix = QuantizedMatrix.from_tensors(projection.key, read_tensors(path))
        matrix = matrix.to(self.own.device)
        return head.with_linear(as_stored(head.linear, projection, matrix))


def train_windows(
    run: StageRun[Options],
    source: SourceModel,
    own: SourceModel,
    stage: str,
    *,
    training: torch.Tensor,
    judging: Texts,
) -> None:
    """Write replacements for all files of a stage, and the judgements; see `train`, `Windows`."""
    folder, matrices = run.folder, run.inputs[stage]
    work = Windows(run, source, own, matrices, training=training, judging=judging)
    if not folder.valid(TUNING_FILE) or (_is_taken(run) and not work.is_done(own.spec.sublayers)):
        judges = work.walk()
        if run.ranks.rank:
            return
        sha256 = write_json(folder.path / TUNING_FILE, judges.report([0, run.config.tune.steps]))
        folder.note(judges.outcome(f"tuned {run.config.tune.layers} layers at a time"))
        folder.commit(TUNING_FILE, sha256)
    if run.ranks.rank:
        return
    for name in [HEAD_FILE] if _is_taken(run) else result_files(own.spec):
        if (matrices / name).exists():
            copy_file(run, matrices, name)


def _is_taken(run: StageRun[Options]) -> bool:
    """Return whether trained matrices replace those before, as the judgements say."""
    return bool(read_json(run.folder.path / TUNING_FILE)["best_step"])
