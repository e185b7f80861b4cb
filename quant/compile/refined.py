"""Write a refined model: the old one byte for byte, except codes and scales.

Shards, their order, `config.json`, indexes, tokenizer and the model's other files stay unchanged,
whichever program wrote them; configs lose the paths they name.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from exl2flow.core.errors import ReconstructionMismatch
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.store.files import Layout, digest, read_json, write_json, write_layout
from exl2flow.core.store.model_files import CONFIG_FILE, carried_files, check_links, left_out
from exl2flow.core.store.source import DIGESTS_FILE
from exl2flow.core.store.stage import RECORD_FILE, Stage, StageRun
from exl2flow.model import TensorFiles
from exl2flow.quant.compile.stage import (
    carry,
    check_output_folder,
    made_from,
    predicted_kl,
    remove_others,
)
from exl2flow.quant.judge.stage import JUDGEMENT_FILE
from exl2flow.quant.quantize.stage import read_report, result_files
from exl2flow.quant.refine.stored_model import StoredModel, refinement

log = logging.getLogger(__name__)

ALLOTTING = (
    "bpw",
    "bpw_total",
    "target_bytes",
    "fit",
    "head_bits",
    "measurement",
    "allocate",
    "tune",
)
NOT_RECORDED = {
    "work_root",
    "out",
    "token_block",
    "publish",
    "clean_after",
    "quality",
    "shard_size_mb",
    *ALLOTTING,
}


def other_files(model: Path) -> list[Path]:
    """Return the files of a model to copy: all except weights and record.

    Raises:
        SourceModelError: one of them links out of the model.
    """
    indexes = sorted(model.glob("*.safetensors.index.json"))
    check_links(indexes)
    return [*carried_files(model), model / CONFIG_FILE, *indexes]


@torch.inference_mode()
def recompile(run: StageRun) -> None:
    """Write the output folder.

    Raises:
        ReconstructionMismatch: a file read back differs from what was written.
        SourceModelError: a file to copy cannot be read, or links out of the model.
    """
    config = refinement(run.config)
    out = config.out.resolve()
    check_output_folder(out, config.source, memory=config.work_dir_root / DIGESTS_FILE)
    stored = StoredModel.open(config, run.device)
    judgement = read_json(run.inputs["judge"] / JUDGEMENT_FILE)
    is_refined = judgement["refined"]
    matrices = run.inputs["refine"] / "sublayers"
    tensors = stored.replaced(matrices) if is_refined else stored.tensors
    files = stored.tensors.files
    others = other_files(config.model)
    run.folder.manifest.total = len(files)
    names = {path.name for path in [*files, *others]} | {RECORD_FILE}
    remove_others(out, names)
    _commit(run, _write_record(run, stored, judgement, names))
    for path in others:
        _commit(run, carry(path, out / path.name))
    if behind := left_out(config.model):
        log.info("not copied from `%s`: %s", config.model, ", ".join(behind))
    for index, path in enumerate(files, 1):
        _write_shard(run, path, out / path.name, tensors, order=stored.tensors.names, cursor=index)
        run.tick(index, len(files), path.name)
        run.stop_if_asked()
    _compare(out, tensors)


def _write_shard(
    run: StageRun,
    old: Path,
    new: Path,
    tensors: TensorFiles,
    *,
    order: Sequence[str],
    cursor: int,
) -> None:
    """Write a file with an old one's names and metadata; `order` lists all names."""
    if run.folder.valid(str(new)):
        return
    with safe_open(old, framework="pt") as file:
        inside, metadata = set(file.keys()), file.metadata()
    names = [name for name in order if name in inside]
    layout: Layout = {name: (tensors.dtype(name), tensors.shape(name)) for name in names}
    contents = (tensors.read(name) for name in names)
    sha256 = write_layout(new, layout, contents, metadata=metadata)
    run.folder.commit(str(new), sha256, cursor=cursor)


def _commit(run: StageRun, path: Path) -> None:
    run.folder.commit(str(path), digest(path))


def _write_record(
    run: StageRun, stored: StoredModel, judgement: Mapping[str, Any], files: set[str]
) -> Path:
    """Record how the folder was made: model, reference, options, verdict, errors."""
    config = run.config
    names = result_files(stored.spec)[: None if stored.has_head else -1]
    layers: list[dict[str, Any]] = [read_report(run.inputs["refine"] / name) for name in names]
    if not judgement["refined"]:
        layers = [_before(layer) for layer in layers]
    decoder = layers[: len(stored.spec.sublayers)]
    weights = sum(layer["bits"] / layer["bpw"] for layer in decoder)
    record = {
        **made_from(run, files),
        "options": config.model_dump(mode="json", exclude=NOT_RECORDED),
        "allocation": {"bpw": sum(layer["bits"] for layer in decoder) / weights},
        "refinement": {"model": str(stored.folder.resolve()), **judgement},
        "predicted_kl": predicted_kl(layers),
        "layers": layers,
    }
    path = config.out.resolve() / RECORD_FILE
    write_json(path, record)
    return path


def _before(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report for a sublayer that keeps its old matrices."""
    projections = {
        name: {key: entry[key] for key in ("params", "bits", "bpw") if key in entry}
        | entry["before"]
        for name, entry in layer["projections"].items()
    }
    return {**layer, "rel_err": layer["before"]["rel_err"], "projections": projections}


def _compare(out: Path, tensors: TensorFiles) -> None:
    """Read every tensor back and compare its bits with the expected ones."""
    written = TensorFiles(out)
    for name in tensors.names:
        look()
        found, expected = (
            files.read(name).reshape(-1).view(torch.uint8) for files in (written, tensors)
        )
        if not torch.equal(found, expected):
            raise ReconstructionMismatch(
                f"`{name}` in `{out}` differs from what was written; the disk or memory is faulty: "
                "delete the folder and repeat the command"
            )


def _options(config: ConversionConfig) -> dict[str, object]:
    model = refinement(config).model
    return {
        "out": str(config.out.resolve()),
        "source": str(config.source.resolve()),
        "model": str(model.resolve()),
        "files": {path.name: digest(path) for path in other_files(model) if path.is_file()},
    }


COMPILE_REFINED = Stage(
    name="compile",
    schema=1,
    inputs=("refine", "judge"),
    options=_options,
    run=recompile,
    files=lambda config: refinement(config).model.glob("*"),
)
