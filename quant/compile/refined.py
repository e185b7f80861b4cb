"""Write a refined model: the old one byte for byte, except codes and scales.

Shards, their order, `config.json`, indexes, tokenizer and the model's other files stay unchanged,
whichever program wrote them; configs lose the paths they name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.reports import matrices_of, sublayer_reports, total_nats
from exl2flow.core.store.files import digest, read_json
from exl2flow.core.store.model_files import CONFIG_FILE, carried_files, check_links, is_weights
from exl2flow.core.store.source import DIGESTS_FILE
from exl2flow.core.store.stage import RECORD_FILE, Stage, StageRun
from exl2flow.model import TensorFiles
from exl2flow.quant.allocate.layout import Shard
from exl2flow.quant.compile.recorded_options import name_of_text, recorded_options
from exl2flow.quant.compile.stage import (
    carry_all,
    check_output_folder,
    check_same,
    earlier_record,
    made_from,
    needs,
    remove_others,
    write_own,
    write_shard,
)
from exl2flow.quant.judge.stage import JUDGEMENT_FILE
from exl2flow.quant.quantize.matrix_work import read_report, result_files
from exl2flow.quant.quantize.routing import EXPERTS, experts_entry
from exl2flow.quant.refine.stored_model import StoredModel
from exl2flow.quant.refine.tuned import latest
from exl2flow.quant.tune.written import TUNING_FILE


def other_files(model: Path) -> list[Path]:
    """Return the files of a model to copy: all except weights and record.

    Raises:
        SourceModelError: one of them links out of the model.
    """
    indexes = sorted(path for path in model.glob("*.index.json") if is_weights(path.name))
    check_links(indexes)
    return [*carried_files(model), model / CONFIG_FILE, *indexes]


@torch.inference_mode()
def recompile(run: StageRun[RefinementConfig]) -> None:
    """Write the output folder.

    Raises:
        ReconstructionMismatch: a file read back differs from what was written.
        SourceModelError: a file to copy cannot be read, or links out of the model.
    """
    config = run.config
    out = config.out.resolve()
    check_output_folder(out, config.source, memory=config.work_dir_root / DIGESTS_FILE)
    stored = StoredModel.open(config, run.device)
    judgement = read_json(run.inputs["judge"] / JUDGEMENT_FILE)
    is_refined = judgement["refined"]
    matrices = latest(run.inputs) / "sublayers"
    tensors = stored.replaced(matrices) if is_refined else stored.tensors
    files = stored.tensors.files
    others = other_files(config.model)
    run.folder.manifest.total = len(files)
    names = {path.name for path in [*files, *others]} | {RECORD_FILE}
    remove_others(out, names)
    write_own(run, RECORD_FILE, _record(run, stored, judgement, names))
    carry_all(run, config.model, others)
    for index, path in enumerate(files, 1):
        with safe_open(path, framework="pt") as file:
            inside, metadata = set(file.keys()), file.metadata()
        order = [name for name in stored.tensors.names if name in inside]
        layout = {name: (tensors.dtype(name), tensors.shape(name)) for name in order}
        shard = Shard(name=path.name, layout=layout)
        write_shard(run, shard, map(tensors.read, order), metadata, index=index)
    written = TensorFiles(out)
    for name in tensors.names:
        check_same(written, name, tensors.read(name))


def _record(
    run: StageRun[RefinementConfig],
    stored: StoredModel,
    judgement: Mapping[str, Any],
    files: set[str],
) -> dict[str, object]:
    """Return how the folder was made: model, reference, options, verdict, errors."""
    config = run.config
    names = result_files(stored.spec)[: None if stored.has_head else -1]
    reports = [read_report(latest(run.inputs) / name) for name in names]
    layers = [report.to_json() for report in reports]
    experts = experts_entry(reports) if judgement["refined"] else {}
    known = earlier_record(stored.folder)
    if not judgement["refined"]:
        layers = [_before(layer, known) for layer in layers]
        experts = {EXPERTS: known[EXPERTS]} if isinstance(known.get(EXPERTS), dict) else {}
    decoder = layers[: len(stored.spec.sublayers)]
    weights = sum(layer["bits"] / layer["bpw"] for layer in decoder)
    return {
        **made_from(run, files),
        "options": recorded_options(
            config, without={"quality"} if config.is_tuned else {"quality", "tune"}
        ),
        "allocation": {"bpw": sum(layer["bits"] for layer in decoder) / weights},
        "refinement": {"model": str(stored.folder.resolve()), **judgement},
        **({"tuning": read_json(run.inputs["tune"] / TUNING_FILE)} if "tune" in run.inputs else {}),
        "predicted_kl": total_nats(matrices_of(sublayer_reports(layers))),
        **experts,
        "layers": layers,
        **({"mtp": known["mtp"]} if "mtp" in known else {}),  # copied as it is
    }


def _before(layer: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report for a sublayer that keeps its old matrices, made as a record knows.

    The tokens of its experts are those of that record, none if it does not tell them.
    """
    projections = {
        name: {key: entry[key] for key in ("key", "params", "bits", "bpw") if key in entry}
        | entry["before"]
        for name, entry in layer["projections"].items()
    }
    report = {**layer, "rel_err": layer["before"]["rel_err"], "projections": projections}
    return report | ({EXPERTS: _tokens(known, report["name"])} if EXPERTS in report else {})


def _tokens(known: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what a record tells of a sublayer's experts."""
    layers = known.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("name") == name:
            return layer[EXPERTS] if isinstance(layer.get(EXPERTS), dict) else {}
    return {}


def _options(config: RefinementConfig) -> dict[str, object]:
    model = config.model
    return {
        "out": str(config.out.resolve()),
        "source": str(config.source.resolve()),
        "model": str(model.resolve()),
        "files": {path.name: digest(path) for path in other_files(model) if path.is_file()},
        **name_of_text(config),
    }


COMPILE_REFINED: Stage[RefinementConfig] = Stage(
    name="compile",
    schema=1,
    inputs=("refine", "tune", "judge"),
    options=_options,
    run=recompile,
    files=lambda config: config.model.glob("*"),
    needs=needs,
)
