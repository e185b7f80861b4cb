"""Contents of an EXL2 folder from its tensor names and headers, whatever program wrote it.

Only headers and group tables are read, so large models take no longer than small ones. Errors,
their costs and the divergence are known if the folder has our records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch

from exl2flow.core.errors import SourceModelError
from exl2flow.core.reports import (
    Json,
    MatrixReport,
    SublayerReport,
    mapping,
    matrices_of,
    number,
    total_nats,
)
from exl2flow.core.runtime.collection import uncollected
from exl2flow.inference.report.blocks import block_name, by_block, is_group
from exl2flow.inference.report.record import Record, read_object, read_record
from exl2flow.model import QuantizedMatrix, TensorFiles, resolve
from exl2flow.model.config.mtp import PREFIX
from exl2flow.model.files.exl2 import is_quantized, tensor_names
from exl2flow.model.memory.host_embedding import host_bytes

EXPERTS = ".experts."  # in the names of an expert's matrices
_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixContents(MatrixReport):
    """One quantized matrix; `rows` counts packed rows per bit width, `bits` all stored bits."""

    shape: tuple[int, int]
    bits: int
    rows: dict[int, int]
    groups: int
    group_sizes: tuple[int, ...]

    def to_json(self) -> Json:
        """Return the matrix under its name in the model."""
        names = ("key", "params", "bpw", "nats", "rel_err", "shape", "bits", "rows")
        return {name: getattr(self, name) for name in (*names, "groups", "group_sizes")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContents:
    """The matrices of one sublayer, of a layer's experts, or the head."""

    name: str
    matrices: tuple[MatrixContents, ...]
    rel_err: float | None

    @property
    def numel(self) -> int:
        """Weights, padding included."""
        return sum(prod(matrix.shape) for matrix in self.matrices)

    @property
    def bits(self) -> int:
        """All stored bits."""
        return sum(matrix.bits for matrix in self.matrices)

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return self.bits / self.numel

    @property
    def nats(self) -> float | None:
        """Sum of the costs of the matrices."""
        return total_nats(self.matrices)

    @property
    def groups(self) -> int:
        """Groups of all matrices."""
        return sum(matrix.groups for matrix in self.matrices)

    @property
    def bit_widths(self) -> tuple[int, ...]:
        """Bit widths in use, largest first."""
        return tuple(sorted({b for m in self.matrices for b in m.rows}, reverse=True))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes in use, smallest first."""
        return tuple(sorted({size for m in self.matrices for size in m.group_sizes}))

    def to_json(self) -> Json:
        """Return the part with its matrices."""
        return {
            "name": self.name,
            "bpw": self.bpw,
            "bit_widths": self.bit_widths,
            "groups": self.groups,
            "group_sizes": self.group_sizes,
            "bytes": self.bits // 8,
            "nats": self.nats,
            "rel_err": self.rel_err,
            "matrices": [matrix.to_json() for matrix in self.matrices],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContents:
    """A whole folder. `layers`: quantized parts of layers; `others`: parts such as the head.

    block: quantized parts of the model's own block that drafts tokens (MTP); host_bytes: of an
    embedding that stays in host memory beside a GPU.
    """

    folder: Path
    architecture: str | None
    declared: Json
    layers: tuple[PartContents, ...]
    others: tuple[PartContents, ...]
    block: tuple[PartContents, ...]
    plain_bytes: int
    host_bytes: int
    file_bytes: int
    record: Record | None

    @property
    def parts(self) -> tuple[PartContents, ...]:
        """All quantized parts, layers first."""
        return (*self.layers, *self.others, *self.block)

    @property
    def matrices(self) -> tuple[MatrixContents, ...]:
        """All quantized matrices, in model order."""
        return tuple(matrix for part in self.parts for matrix in part.matrices)

    @property
    def bpw(self) -> float:
        """Bits per weight of the layers, as `--bpw` counts them; of all if no layer has any."""
        parts = self.layers or self.others or self.block
        return sum(p.bits for p in parts) / sum(p.numel for p in parts)

    @property
    def block_bpw(self) -> float | None:
        """Bits per weight of the block, as `--mtp-bpw` counts them; None: it is not quantized."""
        numel = sum(p.numel for p in self.block)
        return sum(p.bits for p in self.block) / numel if numel else None

    def to_json(self) -> Json:
        """Return everything as JSON."""
        record = self.record
        return {
            "model": str(self.folder),
            "architecture": self.architecture,
            "quantization_config": self.declared,
            "written_by_exl2flow": record is not None,
            "bpw": self.bpw,
            "series": record and record.series,
            "allocated_kl": record and record.allocated_kl,
            "predicted_kl": record and record.predicted_kl,
            "is_tuned": record and record.is_tuned,
            "score": record and record.score,
            "calibration": record and record.calibration,
            "experts": record and (mapping(record.content.get("experts")).get("layers") or None),
            "weights": sum(p.numel for p in self.parts),
            "quantized_bytes": sum(p.bits for p in self.parts) // 8,
            "plain_bytes": self.plain_bytes,
            "host_bytes": self.host_bytes,
            "file_bytes": self.file_bytes,
            "layers": [part.to_json() for part in self.layers],
            "others": [part.to_json() for part in self.others],
            **({"mtp_bpw": self.block_bpw} if self.block else {}),
            **({"mtp": [part.to_json() for part in self.block]} if self.block else {}),
        }


@uncollected()  # all of very many new objects stay, and each pass would visit them
def inspect_model(folder: Path) -> ModelContents:
    """Return the contents of an EXL2 folder.

    Raises:
        SourceModelError: there are no safetensors files, or no matrix is quantized.
        MissingTensor: a quantized matrix lacks one of its tensors.
        TensorShapeError: tensors of a matrix contradict one another.
    """
    if not folder.is_dir():
        raise SourceModelError(f"`{folder}` is not a folder; give the folder of an EXL2 model")
    tensors = TensorFiles(folder)
    keys = dict.fromkeys(name.rpartition(".")[0] for name in tensors.names)
    quantized = [key for key in keys if is_quantized(key, tensors)]
    if not quantized:
        raise SourceModelError(
            f"`{folder}` holds no EXL2 matrices; convert it first with `exl2flow convert`"
        )
    record = read_record(folder)
    reports = (*record.layers, *record.block) if record else ()
    members = _members(quantized, reports)
    parts = _parts(members, tensors, reports)
    model = [part for part in parts if not part.name.startswith(PREFIX)]
    config = read_object(folder / "config.json")
    stored = sum(tensors.nbytes(name) for name in tensors.names)
    return ModelContents(
        folder=folder,
        architecture=_first_text(config.get("architectures")),
        declared=mapping(config.get("quantization_config")),
        layers=tuple(part for part in model if _layer_index(part.name) is not None),
        others=tuple(part for part in model if _layer_index(part.name) is None),
        block=tuple(part for part in parts if part not in model),
        plain_bytes=stored - sum(part.bits for part in parts) // 8,
        host_bytes=_in_host(folder, tensors),
        file_bytes=sum(path.stat().st_size for path in tensors.files),
        record=record,
    )


def _in_host(folder: Path, tensors: TensorFiles) -> int:
    try:
        spec = resolve(folder)
    except SourceModelError:  # of a family that does not run here
        return 0
    return host_bytes(spec, tensors.names, wanted="auto", device=torch.device("cuda"))


def _first_text(value: object) -> str | None:
    """Return the first item of a list of texts, None of anything else."""
    first = value[0] if isinstance(value, list) and value else None
    return first if isinstance(first, str) else None


def _members(keys: Iterable[str], reports: Iterable[SublayerReport]) -> dict[str, list[str]]:
    """Return the name of each part → its matrices.

    The matrices of a layer's experts are one part, with the shared expert, which a record tells; of
    other files, all matrices beside experts belong to them.
    """
    groups = filter(is_group, reports)
    blocks = {m.key: block_name(group) for group in groups for m in group.matrices}
    listed = list(keys)
    mixed = {_part_name(key) for key in listed if EXPERTS in key and key not in blocks}
    members: dict[str, list[str]] = {}
    for key in listed:
        name = _part_name(key)
        name = blocks.get(key) or (name + EXPERTS.rstrip(".") if name in mixed else name)
        members.setdefault(name, []).append(key)
    return members


def _parts(
    members: Mapping[str, Sequence[str]], tensors: TensorFiles, reports: Sequence[SublayerReport]
) -> list[PartContents]:
    """Return sublayers, experts of layers and the head, given the matrices of each."""
    by_key = {matrix.key: matrix for matrix in matrices_of(reports)}
    blocks = {block.name: block for block in by_block(reports)}
    parts = []
    for name in sorted(members, key=_walk_order):
        block = blocks.get(name, SublayerReport(name=name))
        by_name = {matrix.name: matrix for matrix in block.matrices}
        matrices = []
        for key in members[name]:
            known = by_key.get(key) or by_name.get(key.rpartition(".")[2])
            matrices.append(_matrix(key, name, tensors, known or MatrixReport(name=key, key=key)))
        parts.append(
            PartContents(name=name, matrices=tuple(matrices), rel_err=number(block.rel_err))
        )
    return parts


def _matrix(key: str, part: str, tensors: TensorFiles, known: MatrixReport) -> MatrixContents:
    """Return a matrix with what its report tells."""
    matrix = _outline(key, tensors)
    groups, bits, rows = matrix.groups, matrix.total_bits, dict[int, int]()
    for group in groups:
        rows[group.bits] = rows.get(group.bits, 0) + group.rows
    return MatrixContents(
        name=_name_within(key, part),
        key=key,
        params=known.params,
        bpw=bits / prod(matrix.shape),
        nats=number(known.nats),
        rel_err=number(known.rel_err),
        shape=matrix.shape,
        bits=bits,
        rows=rows,
        groups=len(groups),
        group_sizes=tuple(sorted({group.rows for group in groups})),
    )


def _outline(key: str, tensors: TensorFiles) -> QuantizedMatrix:
    """Return a matrix of which only the group table, the one int16 tensor, has been read."""
    stored: dict[str, torch.Tensor] = {}
    for name in (*tensor_names(key), f"{key}.bias"):
        if name in tensors:
            dtype = tensors.dtype(name)
            is_read = dtype == torch.int16
            stored[name] = tensors.read(name) if is_read else _empty(tensors.shape(name), dtype)
    return QuantizedMatrix.from_tensors(key, stored)


@lru_cache
def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that has no values; experts have thousands of the same shape."""
    return torch.empty(shape, dtype=dtype, device=_META)


def _part_name(key: str) -> str:
    """Return the sublayer of a matrix: the name up to the part after the layer's number."""
    words = key.split(".")
    index = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return key if index is None else ".".join(words[: index + 2])


def _name_within(key: str, part: str) -> str:
    """Return a matrix's name below its part; for experts that of their expert comes first."""
    within = part.removesuffix(EXPERTS.rstrip("."))
    if key.startswith(f"{within}."):
        return key.removeprefix(f"{within}.")
    return ".".join(key.split(".")[-2:]) if key != part else key


def _layer_index(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


def _walk_order(name: str) -> tuple[bool, int, bool, str]:
    """Sort by layer, attention first, parts outside the layers last."""
    index = _layer_index(name)
    return index is None, index or 0, "attn" not in name, name
