"""Compile the output folder: shards, index, config, tokenizer and the model's other files.

The layout is complete before anything is written, so its size is known in advance. Afterwards
every matrix is read back and its reconstruction compared with the quantized one.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exl2flow.core.errors import (
    CorruptCheckpoint,
    ReconstructionMismatch,
    SourceModelError,
    StoreError,
)
from exl2flow.core.options.config import ConversionConfig, RunOptions
from exl2flow.core.reports import matrices_of, total_nats
from exl2flow.core.runtime.background import HELPERS, helpers, prefetch, to_host
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.store.files import (
    TEMPORARY_SUFFIX,
    digest,
    digest_of,
    read_json,
    replacing,
    write_json,
    write_layout,
    write_text,
)
from exl2flow.core.store.model_files import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    carried_files,
    has_only_tekken,
    is_carried,
    is_weights,
    left_out,
    public_content,
    without_origin,
)
from exl2flow.core.store.need import Need
from exl2flow.core.store.outline import place_of
from exl2flow.core.store.source import DIGESTS_FILE, SourceFingerprint, provenance
from exl2flow.core.store.stage import (
    FILES,
    KINDS_FILE,
    RECORD_FILE,
    ROWS_FILE,
    SOURCE_FINGERPRINT,
    Stage,
    StageRun,
)
from exl2flow.core.store.store import versions
from exl2flow.model import CanonicalTensors, ModelSpec, TensorFiles, Tokenizer, carried, resolve
from exl2flow.model.files.exl2 import QuantizedMatrix, tensor_names
from exl2flow.model.files.source_tensors import source_form
from exl2flow.model.layers.mtp import block_in
from exl2flow.quant.allocate.block import (
    block_bytes,
    block_options,
    quantized_block,
    stored_spec,
)
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.allocate.layout import (
    FORMAT_METADATA,
    Shard,
    carried_bytes,
    carried_tensors,
    output_layout,
    plain_layout,
    plain_tensors,
    plan_shards,
    tensor_bytes,
)
from exl2flow.quant.compile.recorded_options import (
    name_of_preset,
    name_of_text,
    recorded_conversion,
)
from exl2flow.quant.compile.stored_block import StoredBlock
from exl2flow.quant.quantize.matrix_work import read_report, result_files
from exl2flow.quant.quantize.routing import experts_entry
from exl2flow.quant.quantize.stored_form import reconstruction_digest
from exl2flow.quant.training.trainable import fits_half
from exl2flow.quant.tune.written import TUNING_FILE
from exl2flow.quant.walk.needs import HALF, ModelSizes

log = logging.getLogger(__name__)

DECODING = 3  # bytes per weight that each thread holds on a GPU to compare
LEFTOVERS = f".*{TEMPORARY_SUFFIX}"
INDEX_FILE = "model.safetensors.index.json"


def check_output_folder(out: Path, source: Path, *, memory: Path) -> None:
    """Refuse a folder with contents that a conversion of this source did not write.

    A source is recognized by its place, where it may have changed, or by its fingerprint.

    Args:
        out: the output.
        source: the model's folder.
        memory: see `SourceFingerprint.of`.

    Raises:
        StoreError: the folder holds other contents.
        ReadFailed: its record cannot be read.
    """
    if not out.exists() or (out.is_dir() and set(out.iterdir()) <= set(out.glob(LEFTOVERS))):
        return
    record = earlier_record(out)
    place, known = record.get("source"), record.get(SOURCE_FINGERPRINT)
    found = SourceFingerprint.of(source, memory=memory) if known is not None else None
    is_same = found is not None and found.is_named(known, source, memory=memory)
    if place == str(place_of(source)):
        if known is not None and not is_same:
            text = "the output `%s` was made from other files in `%s`; this run replaces it"
            log.warning(text, out, place)
        return
    if not is_same:
        fact = "exists and was not made from this source by exl2flow"
        if place:
            what = f"not from the model in `{source}`"
            what = what if known else f"and its record does not tell whether `{source}` is the same"
            fact = f"was made from `{place}`, {what}"
        raise StoreError(f"the output `{out}` {fact}; choose another `--out` or delete it")


def earlier_record(out: Path) -> dict[str, Any]:
    """Return the record of an output, empty if there is none.

    Raises:
        ReadFailed: it cannot be read.
    """
    try:
        record = read_json(out / RECORD_FILE)
    except CorruptCheckpoint:
        return {}
    return record if isinstance(record, dict) else {}


class _Tensors:
    """Finds each output tensor in the source, the quantized sublayers or the quantized block."""

    def __init__(self, spec: ModelSpec, quantized: Path, block: StoredBlock | None = None) -> None:
        self.source = CanonicalTensors(spec)
        self.plain = plain_layout(spec)
        self.carried = carried(spec, self.source)
        self.quantized = TensorFiles(quantized)
        self.block = block

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as it is stored in the output."""
        look()
        if self.block is not None and name in self.block.layout:
            return self.block.read(name)
        if name in self.quantized:
            return self.quantized.read(name)
        if name in self.carried:
            return self.source.read(name)
        tensor = self.source.read(name)
        if self.plain[name][0] is torch.float16:
            tensor = fits_half(tensor, name)
        return tensor[: shape[0]].expand(shape).contiguous()  # embeddings may have padding rows


@torch.inference_mode()
def compile_model(run: StageRun[ConversionConfig]) -> None:
    """Write the output folder.

    Raises:
        ReconstructionMismatch: a file read back differs from what was quantized.
        SourceModelError: a carried file cannot be read, or links out of the model.
    """
    config = run.config
    spec = resolve(config.source)
    found = quantized_block(config, spec)
    block = None
    if found is not None:
        block = StoredBlock(found, run.inputs["mtp"], run.inputs["tokenize"])
    spec = stored_spec(config, spec)
    out = config.out.resolve()
    check_output_folder(out, config.source, memory=config.work_dir_root / DIGESTS_FILE)
    quantized = _quantized(run)
    choice = read_choice(run.inputs["allocate"])
    layout = {**output_layout(spec, choice), **(block.layout if block else {})}
    shards = plan_shards(layout, config.shard_size_mb)
    extras = carried_files(config.source)
    run.folder.manifest.total = len(shards)
    names = {CONFIG_FILE, RECORD_FILE, *(p.name for p in extras), *(s.name for s in shards)}
    names |= {INDEX_FILE} if len(shards) > 1 else set()
    names |= {TOKENIZER_FILE} if has_only_tekken(config.source) else set()
    remove_others(out, names)
    write_own(run, RECORD_FILE, _record(run, spec, block, names))
    carry_all(run, config.source, extras)
    if has_only_tekken(config.source):
        path = out / TOKENIZER_FILE
        write_text(path, Tokenizer.load(config.source).backend.to_str())
        run.folder.commit(str(path), digest(path))
    tensors = _Tensors(spec, quantized / "sublayers", block)
    for index, shard in enumerate(shards, 1):
        reads = (partial(tensors.read, name, entry[1]) for name, entry in shard.layout.items())
        write_shard(run, shard, prefetch(reads), FORMAT_METADATA, index=index)
    if len(shards) > 1:
        write_own(run, INDEX_FILE, _index(shards))
    write_own(run, CONFIG_FILE, _config(run, spec))
    _compare(out, quantized, spec, tensors, run.device)


def _quantized(run: StageRun[ConversionConfig]) -> Path:
    """Return the folder of quantized tensors, after tuning if it ran."""
    return run.inputs.get("tune", run.inputs["quantize"])


def write_own(run: StageRun[RunOptions], name: str, content: object) -> None:
    """Write a JSON file into the output and commit it."""
    path = run.config.out.resolve() / name
    run.folder.commit(str(path), write_json(path, content))


def write_shard(
    run: StageRun[RunOptions],
    shard: Shard,
    contents: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None,
    *,
    index: int,
) -> None:
    """Write and commit a shard of the output, the `index`-th, unless an earlier run did."""
    path, folder = run.config.out.resolve() / shard.name, run.folder
    if not folder.valid(str(path)):
        sha256 = write_layout(path, shard.layout, contents, metadata=metadata)
        folder.commit(str(path), sha256, cursor=index)
    run.tick(index, folder.manifest.total, shard.name)
    run.stop_if_asked()


def carry_all(run: StageRun[RunOptions], model: Path, files: Iterable[Path]) -> None:
    """Copy a model's other files into the output and commit them; log what stays behind."""
    for path in files:
        copy = carry(path, run.config.out.resolve() / path.name)
        run.folder.commit(str(copy), digest(copy))
    if others := left_out(model):
        log.info("not copied from `%s`: %s", model, ", ".join(others))


def carry(source: Path, target: Path) -> Path:
    """Copy a file atomically; configs lose the paths they name.

    Raises:
        SourceModelError: the source cannot be read.
        WriteFailed: the target cannot be written.
    """
    try:
        data = public_content(source) or source.read_bytes()
    except OSError as error:
        raise SourceModelError(
            f"cannot read `{source}`: {error.strerror or error}; check the file and its permissions"
        ) from error
    with replacing(target) as copy:
        copy.write(data)
    return target


def remove_others(out: Path, names: set[str]) -> None:
    """Delete leftovers of an earlier or killed conversion, and only these; name what is similar.

    These are partial files and what the earlier one recorded as its own. A record of an older
    version lists no files: then they are the weights. Call before a new record is written.
    """
    record = earlier_record(out)
    is_listed = isinstance(record.get(FILES), list)
    recorded = {name for name in record[FILES] if isinstance(name, str)} if is_listed else set()
    for path in sorted(out.glob("*")):
        name = path.name
        if name in names | {RECORD_FILE} or path.is_dir():
            continue
        is_own = name in recorded if is_listed else bool(record) and is_weights(name)
        if is_own or path.match(LEFTOVERS):
            path.unlink(missing_ok=True)
        elif is_weights(name):
            text = "`%s` is not of this conversion and stays; move it away: programs read it, too"
            log.warning(text, path)
        elif record and not is_listed and is_carried(name):
            log.warning("`%s` is not in the source; delete it unless it is yours", path)


def made_from(run: StageRun[RunOptions], names: set[str]) -> dict[str, object]:
    """Return the entries of a record by which its folder and the files in it are recognized."""
    return {
        "source": str(run.config.source.resolve()),
        SOURCE_FINGERPRINT: digest_of(run.folder.manifest.source),
        "fingerprint": run.folder.manifest.fingerprint,
        FILES: sorted(names),
        "versions": versions(),
        "provenance": provenance(run.config.source),
    }


def _record(
    run: StageRun[ConversionConfig], spec: ModelSpec, block: StoredBlock | None, names: set[str]
) -> dict[str, object]:
    """Return how the folder was made: source, options, rows, allocation, errors and their cost."""
    allocation = read_json(run.inputs["allocate"] / ALLOCATION_FILE)
    layers = [read_report(_quantized(run) / name) for name in result_files(spec)]
    apart = carried_tensors(spec)
    record = {
        **made_from(run, names),
        "source_form": source_form(spec, CanonicalTensors(spec)),
        "options": recorded_conversion(run.config, has_block=block_in(spec) is not None),
        "allocation": {k: v for k, v in allocation.items() if k not in ("choice", "params")},
        "calibration": _calibration(run),
        "tuning": read_json(run.inputs["tune"] / TUNING_FILE) if "tune" in run.inputs else None,
        "predicted_kl": total_nats(matrices_of(layers)),
        **experts_entry(layers),
        "layers": [layer.to_json() for layer in layers],
        **({"mtp": block.record()} if block else {}),
    }
    if apart:
        parts = ", ".join(name.strip(".") for name in spec.family.carried)
        size = sum(map(tensor_bytes, apart.values()))
        record["not_quantized"] = {"parts": parts, "tensors": len(apart), "bytes": size}
    return record


def _calibration(run: StageRun[ConversionConfig]) -> dict[str, object]:
    """Return the text's name, the rows' digest, and the counts and notes of each mix's kinds."""
    described = read_json(run.inputs["tokenize"] / KINDS_FILE)
    mixes = {
        mix: {"kinds": dict(Counter(rows["kinds"])), "notes": rows["notes"]}
        for mix, rows in described.items()
    }
    rows = digest(run.inputs["tokenize"] / ROWS_FILE)
    return {"dataset": run.config.calibration.dataset, "sha256": rows, **mixes}


def _index(shards: list[Shard]) -> dict[str, object]:
    sizes = [tensor_bytes(entry) for shard in shards for entry in shard.layout.values()]
    return {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: shard.name for shard in shards for name in shard.layout},
    }


def _config(run: StageRun[ConversionConfig], spec: ModelSpec) -> dict[str, object]:
    """Return config.json with the block that identifies EXL2 to other programs."""
    config = run.config
    calibration = config.calibration
    allocation = read_json(run.inputs["allocate"] / ALLOCATION_FILE)
    content: dict[str, object] = without_origin(
        json.loads((config.source / CONFIG_FILE).read_bytes())
    )
    extension = {"extension": list(spec.extension)} if spec.extension else {}
    content["quantization_config"] = {
        **extension,
        "quant_method": "exl2",
        "version": versions()["exl2flow"],
        "bits": config.bpw or round(allocation["bpw"], 2),
        "head_bits": min(allocation["params"][spec.head.key]["bits"]),
        "calibration": {
            "rows": calibration.rows,
            "length": calibration.row_tokens,
            "dataset": calibration.dataset,
        },
    }
    return content


def _reports(quantized: Path, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield (key, sha256 of the reconstruction) for all quantized linears."""
    for name, sublayer in zip(result_files(spec), [*spec.sublayers, None], strict=True):
        projections = sublayer.projections if sublayer else (spec.head,)
        digests = {item.name: item.sha256 for item in read_report(quantized / name).matrices}
        for projection in projections:
            yield projection.key, digests[projection.name] or ""


def _compare(out: Path, quantized: Path, spec: ModelSpec, tensors: _Tensors, device: str) -> None:
    """Read every tensor back and compare its reconstruction with the quantized one."""
    written = TensorFiles(out)
    plain = plain_tensors(spec)
    plain |= {name: shape for name, (_, shape) in tensors.carried.items()}
    reports = [*_reports(quantized, spec)]
    if tensors.block is not None:
        plain |= {name: shape for name, (_, shape) in tensors.block.plain.items()}
        reports += tensors.block.digests()

    def check(key: str, sha256: str) -> None:
        look()
        names = stored_names(written, key)
        mismatch = ReconstructionMismatch(
            f"`{key}` in `{out}` does not decode to what was quantized; the disk or memory is "
            "faulty: delete the folder and repeat the command"
        )
        try:
            matrix = QuantizedMatrix.from_tensors(key, {name: written.read(name) for name in names})
        except SourceModelError as error:  # no matrix at all
            raise mismatch from error
        decoded = to_host({key: matrix.to(device).dequantize()})()[key]
        if reconstruction_digest(decoded) != sha256:
            raise mismatch
        if matrix.bias is not None:
            plain[f"{key}.bias"] = tuple(matrix.bias.shape)

    # while a GPU decodes, other matrices are read and hashed
    together = map if device == "cpu" else helpers().map
    for _ in together(check, *zip(*reports, strict=True)):
        pass
    for name, shape in plain.items():
        check_same(written, name, tensors.read(name, shape))


def stored_names(written: Container[str], key: str) -> list[str]:
    """Return the names of a matrix's tensors among those of all."""
    return [name for name in (*tensor_names(key), f"{key}.bias") if name in written]


def check_same(written: TensorFiles, name: str, expected: torch.Tensor) -> None:
    """Read a tensor back and compare its bits with the expected ones: 0.0 is not -0.0.

    Raises:
        ReconstructionMismatch: they differ.
    """
    look()
    bits = [t.reshape(-1).view(torch.uint8) for t in (written.read(name), expected)]
    if not torch.equal(*bits):
        raise ReconstructionMismatch(
            f"`{name}` in `{written.folder}` differs from what was written; the disk or memory is "
            "faulty: delete the folder and repeat the command"
        )


def needs(config: RunOptions, sizes: ModelSizes) -> Need:
    """Forecast the stage: the output, and what each thread of `_compare` holds on a GPU."""
    plain = HALF * sum(map(math.prod, plain_tensors(sizes.spec).values()))
    apart = carried_bytes(stored_spec(config, sizes.spec)) + block_bytes(config, sizes.spec)
    output = sizes.packed + plain + apart
    on_gpu = sizes.on_gpu(HELPERS * DECODING * sizes.largest)
    return Need(output_bytes=output, holds="", **on_gpu)


def _options(config: ConversionConfig) -> dict[str, object]:
    files = [config.source / CONFIG_FILE, *carried_files(config.source)]
    return {
        "out": str(config.out.resolve()),
        "source": str(config.source.resolve()),
        "shard_size_mb": config.shard_size_mb,
        "files": {path.name: digest(path) for path in files if path.is_file()},
        **name_of_text(config),
        **name_of_preset(config),
        **block_options(config),
    }


COMPILE: Stage[ConversionConfig] = Stage(
    name="compile",
    schema=3,
    inputs=("tokenize", "mtp", "allocate", "quantize", "tune"),
    options=_options,
    run=compile_model,
    files=lambda config: carried_files(config.source),
    needs=needs,
)
