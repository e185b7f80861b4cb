"""Quantize a model's own block that drafts tokens (MTP), at a bitrate of its own.

The block reads states of the source model, not of a quantized one: so all bitrates of a sweep have
the same block. Its joint and the sublayers of its one layer are measured, get their bits, and are
rounded as those of the model are; the errors of the joint and of the sublayers before are corrected
alike.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exl2flow.core import words
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.files import read_tensors, write_json
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import get_ops, tensor_cores
from exl2flow.model import Linear, SublayerSpec
from exl2flow.model.config.mtp import MtpSpec, mtp_of
from exl2flow.model.files.exl2 import QuantizedMatrix
from exl2flow.quant.allocate.block import block_numel, quantized_block
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.measure.compact import write_results
from exl2flow.quant.measure.measurement import read_entries
from exl2flow.quant.measure.results import CandidateResult, Results
from exl2flow.quant.measure.stage import Measuring
from exl2flow.quant.mtp.allocation import allocated, measured_joint, used_bits
from exl2flow.quant.mtp.pairs import BlockSource
from exl2flow.quant.quantize.matrix_work import read_report, sublayer_file
from exl2flow.quant.quantize.stage import Quantizing
from exl2flow.quant.quantize.stage import needs as quantizing_needs
from exl2flow.quant.quantize.stored_form import as_stored
from exl2flow.quant.tokenize.stage import load_rows, unjudged_rows
from exl2flow.quant.walk.limits import effect_of_limit
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import SublayerWork, advance, remedied, save_here

log = logging.getLogger(__name__)

JOINT_FILE = "sublayers/joint.safetensors"
JOINT_MEASURED = "measured/joint.json"


def block_files(found: MtpSpec) -> list[str]:
    """Return the files with the matrices of a finished stage, in order."""
    return [JOINT_FILE, *map(sublayer_file, found.layer.sublayers)]


def measured_file(sublayer: SublayerSpec) -> str:
    """Return the name of the candidates of a sublayer inside the stage folder."""
    return f"measured/{sublayer.index:04d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Converting:
    """The stage at work.

    states: the source's behind its last layer, fp32 (rows, t, hidden); ids: int64 (rows, t).
    """

    run: StageRun[ConversionConfig]
    block: BlockSource
    states: torch.Tensor
    ids: torch.Tensor

    @property
    def order(self) -> tuple[SublayerSpec, ...]:
        return self.block.spec.layer.sublayers

    def commit(self, file: str, sha256: str, detail: str) -> None:
        """Commit a file, and stop if a signal came."""
        folder = self.run.folder
        cursor = folder.manifest.cursor + 1
        folder.commit(file, sha256, cursor=cursor)
        log.info("%s", detail)
        self.run.tick(cursor, folder.manifest.total, detail)
        self.run.stop_if_asked()

    def walk(self, work: SublayerWork, states: torch.Tensor, files: Mapping[int, str]) -> None:
        """Do the work of the block's sublayers that lack it; `files`: index → name of a result."""
        folder, layer = self.run.folder, self.block.layer
        if all(map(folder.valid, files.values())):
            return
        for sublayer in layer.sublayers(self.order):
            spec, file = sublayer.spec, files[sublayer.spec.index]
            states = layer.entering(states, spec)
            path = folder.path / file
            if folder.valid(file):
                work.replay(sublayer, states, path)
                continue
            store = work.compute(sublayer, states, path)
            assert store is not None  # no other rank works on a block
            self.commit(file, store(), f"{spec.name} {work.describe(path)}")

    def measure(self) -> None:
        """Write the candidates of the joint and of the sublayers, on a part of the rows."""
        run, block = self.run, self.block
        step = max(1, len(self.ids) // run.config.calibration.measure_rows)
        states, ids = self.states[::step], self.ids[::step]
        if not run.folder.valid(JOINT_MEASURED):
            key = block.spec.joint.key
            results = {key: measured_joint(block, block.hessian(states, ids), run.config)}
            sha256 = write_results(run.folder.path / JOINT_MEASURED, results, compact=False)
            self.commit(JOINT_MEASURED, sha256, f"{key} measured")
        work = Measuring(folder=run.folder, options=run.config.rounding, compact=False)
        files = {sublayer.index: measured_file(sublayer) for sublayer in self.order}
        if not all(map(run.folder.valid, files.values())):
            self.walk(work, block.entering(states, ids, block.joint), files)

    def allocate(self) -> None:
        """Write the choice of all matrices."""
        folder, found = self.run.folder, self.block.spec
        if folder.valid(ALLOCATION_FILE):
            return
        slots: dict[str, Results] = {}
        for file in (JOINT_MEASURED, *map(measured_file, self.order)):
            for name, entries in read_entries(folder.path / file).items():
                slots[name] = Results.of([*map(CandidateResult.from_json, entries)])
        choice = allocated(found, slots, self.run.config)
        bits, numel = used_bits(found, choice), block_numel(found)
        content = {
            "used_bits": bits,
            "numel": numel,
            "bpw": bits / numel,
            "params": {key: params.to_json() for key, params in choice.items()},
        }
        sha256 = write_json(folder.path / ALLOCATION_FILE, content)
        self.commit(ALLOCATION_FILE, sha256, f"bpw={words.bits(bits / numel)}")

    def quantize(self) -> None:
        """Write the matrices of the joint and of the sublayers."""
        run, block = self.run, self.block
        work = Quantizing(run, block.spec.layer, len(self.ids), read_choice(run.folder.path))
        joint = self._rounded_joint(work)
        files = {sublayer.index: sublayer_file(sublayer) for sublayer in self.order}
        if all(map(run.folder.valid, files.values())):
            return
        again = [*work.again]
        entered = block.entering(self.states, self.ids, joint)
        if again:  # the source's own, by which errors are corrected
            twins = block.entering(self.states[again], self.ids[again], block.joint)
            entered = block.layer.placed(torch.cat([entered, twins]))
        self.walk(work, entered, files)

    def _rounded_joint(self, work: Quantizing) -> Linear:
        """Return the joint as the output has it."""
        folder, block = self.run.folder, self.block
        projection = block.spec.joint
        if not folder.valid(JOINT_FILE):
            hessian = block.hessian(self.states, self.ids)
            packed = work.alone(projection, block.joint, hessian)
            sha256 = work.store_alone(packed, JOINT_FILE)
            report = read_report(folder.path / JOINT_FILE)
            detail = f"{projection.key} bpw={words.bits(report.bpw)}"
            self.commit(JOINT_FILE, sha256, f"{detail} rel_err={words.error(report.rel_err)}")
        tensors = read_tensors(folder.path / JOINT_FILE)
        matrix = QuantizedMatrix.from_tensors(projection.key, tensors)
        return as_stored(block.joint, projection, matrix.to(block.layer.device))


@tensor_cores()
@torch.no_grad()
def convert_block(run: StageRun[ConversionConfig]) -> None:
    """Write the stored tensors of the block's matrices into the stage folder."""
    model = SourceModel.open(run.config, run.device)
    found = mtp_of(model.spec)
    assert found is not None
    folder = run.folder
    files = [JOINT_MEASURED, *map(measured_file, found.layer.sublayers), ALLOCATION_FILE]
    files += block_files(found)
    passed = len(model.spec.sublayers)
    folder.manifest.total = total = passed + len(files)
    if not all(map(folder.valid, files)):
        get_ops(run.device).prepare_rounding()
        remedied(model, lambda model: _convert(run, model, found, files))
    run.tick(total, total, found.joint.key)


def _convert(
    run: StageRun[ConversionConfig], model: SourceModel, found: MtpSpec, files: list[str]
) -> None:
    ids = _rows(run)
    states = final_states(run, model, ids)
    done = sum(map(run.folder.valid, files))
    run.folder.manifest.cursor = len(model.spec.sublayers) + done
    block = BlockSource.open(model, found)
    converting = _Converting(run=run, block=block, states=states, ids=ids)
    converting.measure()
    converting.allocate()
    converting.quantize()


def _rows(run: StageRun[ConversionConfig]) -> torch.Tensor:
    """Return the rows to round for, int64 (rows, t): noise has no next token."""
    config, folder = run.config, run.inputs["tokenize"]
    if config.judges:
        ids = unjudged_rows(folder, "quantize", config.held_out)
    else:
        ids = load_rows(folder, "quantize")
    return ids[ids[:, 0] >= 0]


def final_states(
    run: StageRun[ConversionConfig], model: SourceModel, ids: torch.Tensor
) -> torch.Tensor:
    """Return the source's states behind its last layer, fp32 (rows, t, hidden).

    They are saved from time to time.
    """
    order, folder = model.spec.sublayers, run.folder
    saved = folder.load_states()
    if saved is not None:
        start, states = saved[0], model.placed(saved[1])
    else:
        start, states = 0, model.initial_states(ids)
    for sublayer in model.sublayers(order[start:]):
        spec = sublayer.spec
        states = model.entering(states, spec)
        advance(sublayer, states)
        run.tick(spec.index + 1, folder.manifest.total, spec.name)
        save_here(run, [states], spec.index + 1, lambda groups: groups[0])
    return model.entering(states, None)


def _options(config: ConversionConfig) -> dict[str, object]:
    return {
        "rope": config.rope.model_dump(),
        "rounding": config.rounding.fingerprinted(),
        "bpw": config.mtp.bpw,
        "measure_rows": config.calibration.measure_rows,
        "prefer": config.allocate.prefer,
        "experts": config.allocate.experts,
        **({"held_out_rows": config.held_out} if config.judges else {}),
    }


MTP: Stage[ConversionConfig] = Stage(
    name="mtp",
    schema=2,
    inputs=("tokenize",),
    options=_options,
    run=convert_block,
    enabled=lambda config: quantized_block(config) is not None,
    gpu_options=lambda config: effect_of_limit(config, config.calibration.row_tokens),
    needs=quantizing_needs,  # states exist twice here, too: before the block and in it
    is_shared=True,
    removable=True,
)
