"""The sensitivity stage: one backward pass of the source gives the Fisher factors of every matrix.

Sublayers are walked backward one at a time. A forward walk computes the states entering them; it
keeps every √L-th on disk and recomputes those between, so memory holds one sublayer, its states and
their gradients, at any depth.
"""

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from exl2flow.core.errors import CalibrationError
from exl2flow.core.options.config import HELD_OUT_ROWS, RunOptions, SensitivityOptions
from exl2flow.core.runtime.background import Background, HostTensors, helpers, to_host
from exl2flow.core.runtime.memory import available_memory, give_back_pinned, pinned_block
from exl2flow.core.store.files import read_tensors, write_tensors
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import get_ops, tensor_cores
from exl2flow.model import ModelSpec, ProjectionSpec, Sublayer, SublayerSpec
from exl2flow.quant.sensitivity.backward import (
    LOGIT_ELEMENTS,
    check_gradients,
    drawn,
    head_backward,
    sublayer_backward,
)
from exl2flow.quant.sensitivity.expert_factors import (
    LayerSums,
    expert_factors,
    group_bytes,
    layer_file,
    storing_group,
    storing_layer,
    sums_of,
)
from exl2flow.quant.sensitivity.fisher import (
    Factors,
    FactorSum,
    StoredFactors,
    Sums,
    factor_bytes,
    storing_factors,
    unpacked,
)
from exl2flow.quant.tokenize.stage import split_rows, text_rows
from exl2flow.quant.walk.deal import Deal, PieceSums
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.needs import FLOAT, ModelSizes
from exl2flow.quant.walk.source_model import DTYPE, SourceModel
from exl2flow.quant.walk.walk import advance, remedied, save_when_due

log = logging.getLogger(__name__)

HEAD_FILE = "factors/head.safetensors"
STATES_DIR = "inputs"  # in the stage folder while it runs
KEPT_SHARE = 0.5  # of main memory, at most, for states kept beside a GPU
HEAD_BLOCK = 1024  # most out-features per block of the head, which has very many columns


def factor_file(index: int) -> str:
    """Return the name of a sublayer's factors inside the stage folder."""
    return f"factors/{index:04d}.safetensors"


def factor_files(spec: ModelSpec) -> list[str]:
    """Return the files of a finished stage, in model order."""
    layers = dict.fromkeys(s.layer_index for s in spec.sublayers if s.group is not None)
    own = [factor_file(sublayer.index) for sublayer in spec.sublayers]
    return [*own, *map(layer_file, layers), HEAD_FILE]


class FactorFiles:
    """The factors of a finished stage; with a GPU, the next file is read ahead.

    order: of the reads; None: one sublayer after the other, then the head.
    """

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        self.folder = folder
        self.order: Sequence[int | Literal["head"]] | None = None
        self.device = torch.device(device)
        self._ahead: dict[Path, Future[StoredFactors]] = {}

    def read(self, index: int | Literal["head"]) -> dict[str, Factors]:
        """Return projection → factors of a sublayer or of the head (`lm_head`).

        Raises:
            CorruptCheckpoint: a file is missing or damaged.
        """
        path = self._path(index)
        ahead = self._ahead.pop(path, None)
        stored = ahead.result() if ahead else StoredFactors.read(path)
        following = self._following(index) if self.device.type == "cuda" else None
        if following is not None:
            self._ahead[following] = helpers().submit(StoredFactors.read, following, pinned=True)
        return unpacked(stored, self.device) | expert_factors(stored, self.device)

    def _following(self, index: int | Literal["head"]) -> Path | None:
        """Return the file that is read next."""
        if self.order is not None:
            later = self.order[self.order.index(index) + 1 :]
            return self._path(later[0]) if later else None
        if index == "head":
            return None
        following = self._path(index + 1)
        return following if following.exists() else self._path("head")

    def _path(self, index: int | Literal["head"]) -> Path:
        return self.folder / (HEAD_FILE if index == "head" else factor_file(index))


def spread_rows(folder: Path, count: int, held_out: int = HELD_OUT_ROWS) -> torch.Tensor:
    """Return `count` rows of text, or all there are, evenly spread over the quantizing mix.

    Rows that judge are left out: factors decide how matrices are rounded and which bits they get.

    Args:
        folder: of `tokenize`.
        count: number of rows.
        held_out: rows that judge.

    Returns:
        int64 (rows, t), without rows of random tokens or noise.

    Raises:
        CalibrationError: the mix has no text.
    """
    ids, suited = text_rows(folder)
    if not suited:
        raise CalibrationError(
            f"none of the {len(ids)} calibration rows is text, which gradients need; use "
            "more rows, or set the sensitivity's kind to `error`"
        )
    rows = split_rows(folder, held_out)[0] if len(suited) > 1 else ids[suited]
    count = min(count, len(rows))
    return rows[[place * len(rows) // count for place in range(count)]]


def head_block(block: int) -> int:
    """Return the largest block size for the head, which is limited even if others are not."""
    return min(block or HEAD_BLOCK, HEAD_BLOCK)


def states_between(count: int) -> int:
    """Return the number of sublayers between stored states: √count, rounded up."""
    return math.ceil(math.sqrt(count))


def kept_states(count: int) -> int:
    """Return the most states kept at a time for `count` sublayers."""
    return 2 * states_between(count)


def factor_sizes(spec: ModelSpec, options: SensitivityOptions) -> list[int]:
    """Return the bytes of the factors of each sublayer and of the head; empty without factors."""
    if options.kind != "fisher":
        return []
    sizes = [factor_bytes_of(s, block=options.block) for s in spec.sublayers]
    return [*sizes, factor_bytes((spec.head,), block=head_block(options.block))]


def factor_bytes_of(sublayer: SublayerSpec, *, block: int) -> int:
    """Return the bytes of a sublayer's factors, of a layer's last experts with what all share."""
    if sublayer.group is None:
        return factor_bytes(sublayer.projections, block=block)
    routed = [p for p in sublayer.projections if p.is_routed]
    others = tuple(p for p in sublayer.projections if not p.is_routed)
    total = group_bytes(routed) + factor_bytes(others, block=block)
    if not sublayer.group.is_last:
        return total
    # those of one expert are as large as what all share
    return total + factor_bytes(sublayer.projections[:3], block=block)


def sublayer_bytes(config: RunOptions, spec: ModelSpec) -> int:
    """Return the bytes that one sublayer or the head needs beside states, row by row."""
    options, row_tokens = config.sensitivity, config.calibration.row_tokens
    factors = factor_sizes(spec, options)
    score = max((layer.num_heads for layer in spec.attending), default=0) * row_tokens**2
    largest = max(
        sum(p.numel + p.out_features * 2 * row_tokens for p in s.projections)
        + _sum_elements(s, stored // 2)
        for s, stored in zip(spec.sublayers, factors, strict=False)
    )
    head = spec.hidden_size * spec.vocab_size + factors[-1] // 2
    head += 4 * min(LOGIT_ELEMENTS, row_tokens * spec.vocab_size)
    return FLOAT * max(largest + 4 * score, head)


def _sum_elements(sublayer: SublayerSpec, stored: int) -> int:
    """Return the elements of sums over rows: a total, and beside it that of a piece, or its copy.

    Args:
        sublayer: the sums of whose matrices.
        stored: elements of the copy, from which the file is written.
    """
    squares = sum(p.in_features**2 for p in sublayer.projections)
    return squares + max(squares, stored)


def needs(config: RunOptions, sizes: ModelSizes) -> Need:
    """Forecast the stage: states, gradients, one sublayer and its sums; only the factors stay."""
    spec, row_tokens = sizes.spec, config.calibration.row_tokens
    states = sizes.token * config.sensitivity.rows * row_tokens
    files = kept_states(len(spec.sublayers)) + 2  # gradients, saved twice
    summing = sizes.gpu_work(row_tokens, weight=4 * FLOAT, square=2 * FLOAT)
    storing = sizes.gpu_work(row_tokens, weight=4 * FLOAT, square=3 * FLOAT, is_shared=True)
    return Need(
        memory_bytes=3 * states + sublayer_bytes(config, spec),
        kept_bytes=sum(factor_sizes(spec, config.sensitivity)),
        passing_bytes=files * states,
        holds="sublayer",
        **sizes.on_gpu(max(summing, storing), 3 * states),
    )


class InputStates:
    """The states entering each sublayer; those most expensive to recompute are kept.

    With a GPU they are kept in main memory if there is room: recomputing them is faster than
    reading them from disk.
    """

    def __init__(self, run: StageRun[RunOptions], model: SourceModel, ids: torch.Tensor) -> None:
        self.run = run
        self.model = model
        self.deal = Deal(len(ids), run.ranks)
        self.ids = ids[self.deal.own.start : self.deal.own.stop]
        self.order = model.spec.sublayers
        self.every = states_between(len(self.order))
        size = pinned_block(self.ids.numel() * model.spec.hidden_size * DTYPE.itemsize)
        room = KEPT_SHARE * (available_memory() or 0)
        self.in_memory = model.device.type == "cuda" and kept_states(len(self.order)) * size < room
        self.kept: dict[int, HostTensors] = {}

    def at(self, index: int) -> torch.Tensor:
        """Return the states fp32 (rows, t, hidden) entering sublayer `index`, or the head's.

        States on the way there are kept if the backward walk needs them.
        """
        folder = self.run.folder
        start, states = self._nearest(index)
        self.kept = {at: kept for at, kept in self.kept.items() if at < index}
        dense_from = (index - 1) // self.every * self.every
        for sublayer in self.model.sublayers(self.order[start:index]):
            states = self.model.entering(states, sublayer.spec)
            advance(sublayer, states, self.deal)
            spec = sublayer.spec
            after = spec.index + 1
            if after >= dense_from or after % self.every == 0:
                self._keep(after, states)
            total = folder.manifest.total
            self.run.tick(folder.manifest.cursor, total, f"forward {spec.name}")
            self.run.stop_if_asked()
        following = self.order[index] if index < len(self.order) else None
        return self.model.entering(states, following)

    def drop(self, from_index: int = 0) -> None:
        """Delete the stored states entering sublayers from an index on, which no resume needs."""
        found = (self.run.folder.path / STATES_DIR).glob("*")
        names = [f"{STATES_DIR}/{path.name}" for path in found if int(path.name[:4]) >= from_index]
        self.run.folder.remove(names)

    def _keep(self, index: int, states: torch.Tensor) -> None:
        if self.in_memory:
            copy = states if states.is_cuda else states.clone()
            self.kept[index] = to_host({"states": copy}, hold=True)
            return
        name = self._name(index)
        sha256 = write_tensors(self.run.folder.path / name, {"states": states})
        self.run.folder.commit(name, sha256)

    def _nearest(self, index: int) -> tuple[int, torch.Tensor]:
        folder = self.run.folder
        for at in range(index, 0, -1):
            if at in self.kept:
                return at, self.model.placed(self.kept[at]()["states"])
            if folder.valid(self._name(at)):
                states = read_tensors(folder.path / self._name(at))["states"]
                return at, self.model.placed(states)
        return 0, self.model.initial_states(self.ids)

    def _name(self, index: int) -> str:
        """Return the name of a file, which differs with the rows in it."""
        own = self.deal.own
        rows = f".{own.start}-{own.stop}" if self.deal.ranks.are_many else ""
        return f"{STATES_DIR}/{index:04d}{rows}.safetensors"


Projections = tuple[ProjectionSpec, ...]


class _WayBack:
    """The backward walk from the head to the first sublayer without factors."""

    def __init__(self, run: StageRun[RunOptions], model: SourceModel, ids: torch.Tensor) -> None:
        self.run = run
        self.model = model
        self.options = run.config.sensitivity
        self.inputs = InputStates(run, model, ids)
        self.tokens, self.deal = ids.numel(), self.inputs.deal
        self.order = model.spec.sublayers
        self.layer: LayerSums | None = None  # of the experts that are being walked

    def walk(self) -> None:
        """Commit every missing file, then delete all stored states."""
        is_open = [self._is_open(sublayer) for sublayer in self.order]
        is_open.append(not self.run.folder.valid(HEAD_FILE))
        if any(is_open):
            last = len(self.order) - is_open[::-1].index(True)
            device = self.model.device
            with Background(device) as self.results, Background(device) as self.saves:
                first = is_open.index(True)
                order = self.order[first : self._begin(last, is_open)]
                for sublayer in self.model.sublayers(order[::-1]):
                    self._sublayer(sublayer)
        self.inputs.drop()

    def _is_open(self, sublayer: SublayerSpec) -> bool:
        """Return whether factors are missing; experts of a layer are walked as a whole."""
        folder, is_shared = self.run.folder, sublayer.group is not None
        if is_shared and not folder.valid(layer_file(sublayer.layer_index)):
            return True
        return not folder.valid(factor_file(sublayer.index))

    def _begin(self, last_open: int, is_open: list[bool]) -> int:
        """Load or compute the gradients to start from; return how many sublayers precede them."""
        folder = self.run.folder
        folder.manifest.cursor = is_open.count(False)
        self.run.tick(folder.manifest.cursor, folder.manifest.total)
        saved = folder.load_states()
        if saved is not None and saved[0] > last_open:
            own = self.deal.own
            start, self.gradient = saved[0], self.model.placed(saved[1][own.start : own.stop])
            return start
        self._head()
        return len(self.order)

    def _head(self) -> None:
        begun = time.monotonic()
        block = head_block(self.options.block)
        projections = (self.model.spec.head,)
        sums = PieceSums(self.deal, self._sums(HEAD_FILE, projections, block=block))
        states, own, head = self.inputs.at(len(self.order)), self.deal.own, self.model.head()
        uniform = drawn(self.deal.rows, states.shape[1], self.options.seed)[own.start : own.stop]
        self.gradient = torch.empty_like(states)
        for number, piece in enumerate(self.deal.pieces):
            one = sums.at(number).get(projections[0].name)
            self.gradient[piece] = head_backward(head, states[piece], uniform[piece], one)
        check_gradients(self.gradient, where="lm_head", first=own.start)
        self._finish(len(self.order), HEAD_FILE, projections, sums, begun)

    def _sublayer(self, sublayer: Sublayer) -> None:
        begun, spec = time.monotonic(), sublayer.spec
        name = factor_file(spec.index)
        empty = self._group_sums(spec) if spec.group else self._sums(name, spec.projections)
        sums, states = PieceSums(self.deal, empty), self.inputs.at(spec.index)
        self.gradient = self.model.entering(self.gradient, spec)
        for number, piece in enumerate(self.deal.pieces):
            sublayer_backward(sublayer, states[piece], self.gradient[piece], sums.at(number))
        check_gradients(self.gradient, where=spec.name, first=self.deal.own.start)
        self._finish(spec.index, name, spec.projections, sums, begun, spec)

    def _group_sums(self, spec: SublayerSpec) -> Sums:
        """Return empty sums for a group of experts, or none if its layer is finished."""
        assert spec.group is not None
        if self.run.folder.valid(layer_file(spec.layer_index)):
            return Sums()
        if spec.group.is_last:
            self.layer = LayerSums()
        return sums_of(spec, block=self.options.block, device=self.model.device)

    def _sums(self, name: str, projections: Projections, block: int | None = None) -> Sums:
        """Return empty sums for projections, or none if their file exists."""
        if self.run.folder.valid(name):
            return Sums()
        block = self.options.block if block is None else block
        device = self.model.device
        return Sums(
            (p.name, FactorSum(p.in_features, p.out_features, block=block, device=device))
            for p in projections
        )

    def _finish(
        self,
        index: int,
        name: str,
        projections: Projections,
        parts: PieceSums[FactorSum],
        begun: float,
        spec: SublayerSpec | None = None,
    ) -> None:
        """Commit factors and gradients, and delete the states that no resume needs.

        Gradients between groups of experts are not saved: a layer is repeated as a whole.
        """
        folder, group = self.run.folder, None if spec is None else spec.group
        sums = parts.total()
        if sums:
            path = folder.path / name
            if spec is None or group is None:
                store = storing_factors(path, projections, sums, self.tokens)
            else:
                assert self.layer is not None
                store = storing_group(path, spec, sums, self.layer, self.tokens)

            def commit(sha256: str) -> None:
                folder.commit(name, sha256, cursor=folder.manifest.cursor + 1)
                log.info("%s elapsed=%.2fs", projections[0].key, time.monotonic() - begun)
                self.run.tick(folder.manifest.cursor, folder.manifest.total, projections[0].key)
                self._drop(index)

            self.results.store(store, commit)
            if spec is not None and group is not None and group.is_first:
                self._finish_layer(spec.layer_index)
        else:
            self._drop(index)
        if group is not None and not group.is_first:
            return
        save_when_due(self.run, self.gradient, index, self.results, self.saves, here=self.deal.own)

    def _finish_layer(self, layer: int) -> None:
        """Commit what the experts of a layer share, after all of their own factors."""
        assert self.layer is not None
        name = layer_file(layer)
        store = storing_layer(self.run.folder.path / name, self.layer, self.tokens)
        self.results.store(store, partial(self.run.folder.commit, name))
        self.layer = None

    def _drop(self, index: int) -> None:
        states = self.run.folder.manifest.states
        if states is not None:
            self.inputs.drop(max(index, states.index))


@tensor_cores()
@torch.no_grad()
def sensitivity(run: StageRun[RunOptions]) -> None:
    """Write the factors of every sublayer and of the head into the stage folder."""
    kept = run.keeps_states
    model = SourceModel.open(run.config, run.device, gradients=True, keeps_states=kept)
    get_ops(run.device).prepare_rounding()
    run.folder.manifest.total = len(model.spec.sublayers) + 1
    rows, held_out = run.config.sensitivity.rows, run.config.held_out
    ids = spread_rows(run.inputs["tokenize"], rows, held_out)
    remedied(model, lambda model: _WayBack(run, model, ids).walk(), run.ranks)
    give_back_pinned()
    run.tick(run.folder.manifest.total, run.folder.manifest.total)


def _options(config: RunOptions) -> dict[str, object]:
    held_out = {"held_out_rows": config.held_out}
    return {**config.sensitivity.model_dump(), "rope": config.rope.model_dump(), **held_out}


SENSITIVITY: Stage[RunOptions] = Stage(
    name="sensitivity",
    schema=3,
    inputs=("tokenize",),
    options=_options,
    run=sensitivity,
    enabled=lambda config: config.sensitivity.kind == "fisher",
    gpu_options=lambda config: effect_of_limit(config, config.calibration.row_tokens),
    needs=needs,
    is_shared=True,
    is_dealt=lambda config: True,
)
