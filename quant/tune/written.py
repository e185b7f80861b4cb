"""Files of the `tune` stage, each like one that it was given."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from exl2flow.core.errors import ReconstructionMismatch
from exl2flow.core.options.config import TrainedOptions
from exl2flow.core.store.files import digest, replacing, write_tensors
from exl2flow.core.store.stage import StageRun
from exl2flow.model import ProjectionSpec
from exl2flow.quant.quantize.matrix_work import read_report
from exl2flow.quant.quantize.stored_form import reconstruction_digest
from exl2flow.quant.training.trainable import TrainedLinear

Options = TypeVar("Options", bound=TrainedOptions)

TUNING_FILE = "tuning.json"  # the judgements


def write_linears(
    run: StageRun[Options],
    matrices: Path,
    name: str,
    projections: Sequence[ProjectionSpec],
    linears: Mapping[str, TrainedLinear],
) -> None:
    """Write and commit a file like that among the matrices, with its report.

    Args:
        run: of the stage.
        matrices: folder of the matrices that were trained.
        name: of the file.
        projections: that it holds.
        linears: projection → its matrix now.

    Raises:
        ReconstructionMismatch: a packed matrix does not decode to the one that was judged.
    """
    report = read_report(matrices / name)
    digests: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for projection in projections:
        linear = linears[projection.name]
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


def copy_file(run: StageRun[Options], matrices: Path, name: str) -> None:
    """Commit a file among the matrices as it is."""
    path = run.folder.path / name
    with replacing(path) as copy:
        copy.write((matrices / name).read_bytes())
    run.folder.commit(name, digest(path))
