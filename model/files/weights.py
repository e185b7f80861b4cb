"""Lazy reading of tensors from the safetensors files of a folder.

Weights in fp8 and mxfp4 appear decoded, as fp16, and their scales not at all; those in mxfp4 keep
the name of their blocks. An index says which files count.
Tensors are read rather than mapped, so the resident memory of a walk is that of the tensors still
referred to. Tensors for a GPU pass through a small pinned buffer.
"""

import json
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from exl2flow.core.errors import (
    Exl2FlowError,
    MissingTensor,
    NonFiniteState,
    SourceModelError,
    TensorShapeError,
)
from exl2flow.core.runtime.background import helpers, send_async
from exl2flow.core.store.model_files import weight_files
from exl2flow.core.store.outline import Outline
from exl2flow.core.store.shard_index import INDEX_FILE, shard_index
from exl2flow.model.config.foreign import LFS_START, advice, is_lfs_pointer, pointer_advice
from exl2flow.model.files import fp8, mxfp4
from exl2flow.model.files.entry import TensorEntry

DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
PIECE_BYTES = 16 << 20  # read at a time, through pinned memory that torch reuses
SHORT_RUN = 1 << 14  # bytes; runs below it are not worth a read each
_LENGTH_BYTES = 8  # a file begins with its header's length, little-endian


class TensorFiles:
    """The tensors of a folder's `*.safetensors`, by name; a second copy is ignored.

    `has_values`: whether they can be read; those of an outline are known by their headers only.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            SourceModelError: no file, a damaged file, a name that stands for two tensors in two
                files, or blocks in mxfp4 without scales that fit them.
            MissingTensor: a file that the index names is absent, and so are its tensors.
        """
        self.folder = folder
        self.has_values = Outline.of(folder) is None
        self._ahead: dict[str, Future[torch.Tensor]] = {}
        self.files = tuple(weight_files(folder))
        if not self.files:
            raise SourceModelError(
                advice(folder)
                or f"`{folder}` holds no `*.safetensors`; give the folder of a model saved in "
                "this format"
            )
        index = shard_index(folder)
        if index:
            named = {*index.values()}
            self.files = tuple(path for path in self.files if path.name in named)
        self._entries: dict[str, TensorEntry] = {}
        for path in self.files:
            for name, entry in _read_header(path).items():
                other = self._entries.setdefault(name, entry)
                if other is not entry and not self._are_same(name, other, entry):
                    raise _two_copies(name, other.path, path, index.get(name))
        _check_index(index, self._entries, folder)
        self._join_scales()

    def _are_same(self, name: str, one: TensorEntry, other: TensorEntry) -> bool:
        """Tell whether two files hold the same bytes under one name, as far as they are here."""
        if (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes):
            return False
        return not self.has_values or _have_same_bytes(name, one, other)

    def _join_scales(self) -> None:
        """Give weights in fp8 and mxfp4 their scales, which then have no names of their own."""
        weights = self.in_fp8
        block = fp8.read_block(self.folder) if weights else None
        for name in weights:
            scale = fp8.scale_name(name, self._entries)
            if scale is not None:
                scales = self._entries.pop(scale)
                self._entries[name] = replace(
                    self._entries[name], scales=scales, scale_name=scale, block=block
                )
            for unused in fp8.unused_names(name):
                self._entries.pop(unused, None)
        for name, entry in [*self._entries.items()]:
            if mxfp4.are_blocks(name, entry.dtype, entry.shape):
                factors = self._entries.get(mxfp4.scale_name(name))
                self._entries[name] = _in_mxfp4(name, entry, factors)
                del self._entries[mxfp4.scale_name(name)]

    def overlaid(
        self, instead: Mapping[str, tuple["TensorFiles", str]], *, without: Iterable[str] = ()
    ) -> "TensorFiles":
        """Return these tensors, some removed and others replaced: name → (files, name there)."""
        overlay = copy(self)
        overlay._ahead = {}
        removed = set(without)
        overlay._entries = {n: entry for n, entry in self._entries.items() if n not in removed}
        overlay._entries |= {n: files._entry(other) for n, (files, other) in instead.items()}
        return overlay

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, in the order of the files."""
        return tuple(self._entries)

    @property
    def in_fp8(self) -> tuple[str, ...]:
        """The names of the weights that are decoded from fp8."""
        return tuple(n for n, entry in self._entries.items() if _is_fp8_weight(n, entry))

    @property
    def in_mxfp4(self) -> tuple[str, ...]:
        """The names of the weights that are decoded from mxfp4."""
        return tuple(n for n, entry in self._entries.items() if entry.dtype == mxfp4.MXFP4)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._entry(name).shape

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor as `read` returns it."""
        entry = self._entry(name)
        is_decoded = _is_fp8_weight(name, entry) or entry.dtype == mxfp4.MXFP4
        return prod(entry.shape) * fp8.DECODED.itemsize if is_decoded else entry.nbytes

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor as `read` returns it.

        Raises:
            SourceModelError: it is not one of `DTYPES`.
            MissingTensor, TensorShapeError: the scales of an fp8 weight are absent or do not fit.
        """
        entry = self._entry(name)
        if _is_fp8_weight(name, entry):
            _grid(name, entry)
            return fp8.DECODED
        if entry.dtype == mxfp4.MXFP4:
            return mxfp4.DECODED
        if entry.dtype not in DTYPES:
            raise SourceModelError(
                f"`{name}` in `{entry.path}` has dtype {entry.dtype}; supported are "
                f"{', '.join(DTYPES)}: use an unquantized model"
            )
        return DTYPES[entry.dtype]

    def fetch(self, names: Iterable[str]) -> None:
        """Start reading tensors into pinned memory in the background; `read` returns each once."""
        for name in names:
            if name in self and name not in self._ahead:
                self._ahead[name] = helpers().submit(self._read, name, pinned=True)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a tensor in its own memory; a copy to a GPU may still be in flight.

        Raises:
            MissingTensor: no file holds it.
            SourceModelError: the file cannot be read or is shorter than its header says.
            NonFiniteState: a weight in fp8 or mxfp4 does not fit fp16.
        """
        fetched = self._ahead.pop(name, None)
        return self._read(name, device) if fetched is None else send_async(fetched.result(), device)

    def read_floating(self, name: str) -> torch.Tensor:
        """Return a tensor as `read` does, if its elements are floating-point numbers.

        Raises:
            SourceModelError: they are integers.
        """
        self.check_floating([name])
        return self.read(name)

    def check_floating(self, names: Iterable[str]) -> None:
        """Check from headers alone that weights can be read as floating-point numbers.

        Raises:
            SourceModelError: a dtype is unknown or an integer; it names one such tensor.
        """
        integers = [name for name in names if not self.dtype(name).is_floating_point]
        if integers:
            raise SourceModelError(
                f"weights of `{self.folder}` are integers: `{integers[0]}` is "
                f"{self.dtype(integers[0])}, {len(integers)} in all; give the model that it was "
                "quantized from"
            )

    def undecodable(self) -> list[str]:
        """Return a line for each fp8 weight that cannot be decoded; reads scales, seldom weights.

        NaN among a weight's own elements are found by `read`.
        """
        lines = []
        for name in self.in_fp8:
            try:
                self._check_scales(name, self._entries[name])
            except Exl2FlowError as error:
                lines.append(str(error))
        return lines

    def _check_scales(self, name: str, entry: TensorEntry) -> None:
        _grid(name, entry)
        if not self.has_values:
            return
        scales = _scales(entry)
        if not scales.isfinite().all():
            raise NonFiniteState(
                f"`{entry.scale_name}` in `{entry.path}` holds NaN or infinity in "
                f"{int((~scales.isfinite()).sum())} of {scales.numel()} scales; download or export "
                "the model again"
            )
        most = torch.finfo(fp8.DECODED).max
        if scales.numel() and float(scales.abs().max()) * fp8.LARGEST > most:
            self._read(name)

    def _read(
        self, name: str, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> torch.Tensor:
        entry, dtype = self._entry(name), self.dtype(name)
        if not self.has_values:
            raise SourceModelError(
                f"`{name}` in `{entry.path}` has no values yet: only headers of the model were "
                "fetched; give the model's name or folder as the source"
            )
        if entry.dtype == fp8.FP8:
            return send_async(_decoded(name, entry, pinned=pinned), device)
        if entry.dtype == mxfp4.MXFP4:
            values = _decoded_blocks(name, entry)
            return send_async(values.pin_memory() if pinned else values, device)
        return _raw(name, entry, dtype, device, pinned=pinned)

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise MissingTensor(
                f"`{name}` is in none of the {len(self.files)} files of `{self.folder}`; fetch "
                "what is missing, or check that `config.json` belongs to these files"
            )
        return entry


def _have_same_bytes(name: str, one: TensorEntry, other: TensorEntry) -> bool:
    first, second = (
        _raw(name, replace(entry, shape=(entry.nbytes,)), torch.uint8) for entry in (one, other)
    )
    return torch.equal(first, second)


def _two_copies(name: str, one: Path, other: Path, counts: str | None) -> SourceModelError:
    """Return the error for a name that stands for different tensors in two files."""
    both = f"`{name}` is both in `{one}` and in `{other}`, with different content"
    if counts not in (one.name, other.name):
        return SourceModelError(f"{both}; remove the file that does not belong to the model")
    stale = other if counts == one.name else one
    code = (
        "from safetensors.torch import load_file as l, save_file as s; "
        f"p = {str(stale)!r}; t = {{k: v.clone() for k, v in l(p).items() if k != {name!r}}}; "
        "s(t, p, {'format': 'pt'})"
    )
    return SourceModelError(
        f"{both}; `{INDEX_FILE}` names `{counts}`, but transformers may read the other one: "
        f'remove the copy that does not count, with `python -c "{code}"`'
    )


def _check_index(index: Mapping[str, str], names: Container[str], folder: Path) -> None:
    """Refuse a folder that lacks a file which its index names."""
    lost = {file for name, file in index.items() if name not in names}
    if absent := sorted(file for file in lost if not (folder / Path(file).name).is_file()):
        raise MissingTensor(
            f"`{absent[0]}` is not in `{folder}`, although `{INDEX_FILE}` names it, {len(absent)} "
            "files in all; fetch what is missing"
        )


def _is_fp8_weight(name: str, entry: TensorEntry) -> bool:
    return entry.dtype == fp8.FP8 and name.endswith(fp8.SUFFIX)


def _grid(name: str, entry: TensorEntry) -> tuple[int, int]:
    """Return the rows and columns of an fp8 weight that share a scale."""
    if entry.scales is None:
        key = name.removesuffix(fp8.SUFFIX)
        wanted = " or ".join(f"`{key}.{scale}`" for scale in fp8.SCALES)
        raise MissingTensor(
            f"`{name}` in `{entry.path}` is fp8, and its scales, {wanted}, are in no file; fetch "
            "what is missing"
        )
    if entry.scales.dtype not in fp8.SCALE_DTYPES:
        raise SourceModelError(
            f"`{entry.scale_name}` in `{entry.scales.path}` has dtype {entry.scales.dtype}; "
            f"supported for scales are {', '.join(fp8.SCALE_DTYPES)}: use an unquantized model"
        )
    if entry.is_rearranged and prod(entry.scales.shape) != 1:
        raise TensorShapeError(
            f"`{entry.scale_name}` in `{entry.scales.path}` has shape {entry.scales.shape}; a "
            f"matrix that is stored transposed or interleaved, as `{name}` is, can only be decoded "
            "with one scale for all of it: use an unquantized model"
        )
    shape = (entry.whole_rows, *entry.shape[1:]) if entry.whole_rows else entry.shape
    names = (name, entry.scale_name)
    return fp8.grid_of(shape, entry.scales.shape, entry.block, names=names)


def _scales(entry: TensorEntry) -> torch.Tensor:
    """Read the scales of an fp8 weight, fp32."""
    assert entry.scales is not None
    dtype = fp8.SCALE_DTYPES[entry.scales.dtype]
    return _raw(entry.scale_name, entry.scales, dtype).float()


def _decoded(name: str, entry: TensorEntry, *, pinned: bool) -> torch.Tensor:
    """Read an fp8 weight and its scales; return the values, fp16 on the CPU."""
    grid, scales = _grid(name, entry), _scales(entry)
    codes = _raw(name, entry, torch.float8_e4m3fn)
    values = torch.empty(entry.shape, dtype=fp8.DECODED, pin_memory=pinned)
    if not fp8.decode(codes, scales, grid, values, first=entry.first):
        raise NonFiniteState(
            f"`{name}` in `{entry.path}`, decoded from fp8, holds NaN or what does not fit fp16 in "
            f"{int((~values.isfinite()).sum()):,} of {values.numel():,} elements; download the "
            "model again, or use an unquantized one"
        )
    return values


def _in_mxfp4(name: str, blocks: TensorEntry, scales: TensorEntry | None) -> TensorEntry:
    """Return the weight whose blocks and scales these are."""
    scale_name, expected = mxfp4.scale_name(name), blocks.shape[:-1]
    if scales is None:
        raise MissingTensor(
            f"`{name}` in `{blocks.path}` is mxfp4, and its scales, `{scale_name}`, are in no "
            "file; fetch what is missing"
        )
    if scales.dtype not in mxfp4.SCALE_DTYPES or scales.shape != expected:
        raise TensorShapeError(
            f"`{scale_name}` in `{scales.path}` is {scales.dtype} of shape {scales.shape}; "
            f"`{name}` implies {mxfp4.SCALE_DTYPES[0]} of shape {expected}: check that both belong "
            "to one model"
        )
    shape = (*expected[:-1], expected[-1] * mxfp4.BLOCK)
    return replace(blocks, dtype=mxfp4.MXFP4, shape=shape, scales=scales, scale_name=scale_name)


def _decoded_blocks(name: str, entry: TensorEntry) -> torch.Tensor:
    """Read blocks in mxfp4 and their scales; return the values, fp16 on the CPU."""
    assert entry.scales is not None
    stored = replace(entry, shape=(*entry.scales.shape, mxfp4.BLOCK_BYTES))
    blocks = _raw(name, stored, torch.uint8)
    scales = _raw(entry.scale_name, entry.scales, torch.uint8)
    return mxfp4.decode(blocks, scales, names=(name, entry.scale_name))


def _raw(
    name: str,
    entry: TensorEntry,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    pinned: bool = False,
) -> torch.Tensor:
    """Read a tensor as it is stored; a copy to a GPU may still be in flight."""
    tensor = torch.empty(entry.stored_shape, dtype=dtype, device=device, pin_memory=pinned)
    if not entry.nbytes:
        return tensor
    left = tensor.view(-1).view(torch.uint8)
    try:
        with entry.path.open("rb") as file:
            if entry.step and entry.run < SHORT_RUN:
                _fill_from_stretches(name, entry, file, left)
            else:
                for offset, size in entry.spans():
                    file.seek(offset)
                    _fill(name, entry, file, left[:size])
                    left = left[size:]
    except OSError as error:
        raise _unreadable(entry.path, error) from error
    return tensor.T.contiguous() if entry.is_transposed else tensor


def _fill(name: str, entry: TensorEntry, file: BufferedReader, room: torch.Tensor) -> None:
    """Read bytes into memory, uint8 (n,); a copy to a GPU may still be in flight."""
    for part in torch.split(room, PIECE_BYTES):
        # torch reuses pinned memory once it is copied
        piece = torch.empty_like(part, device="cpu", pin_memory=True) if part.is_cuda else part
        if file.readinto(memoryview(piece.numpy().data)) != len(part):
            raise SourceModelError(
                f"`{entry.path}` ends within `{name}`; it was cut short, fetch it again"
            )
        if part.is_cuda:
            part.copy_(piece, non_blocking=True)


def _fill_from_stretches(
    name: str, entry: TensorEntry, file: BufferedReader, room: torch.Tensor
) -> None:
    """Read short runs, uint8 (n,), together with what lies between them."""
    run, step = entry.run, entry.step
    for offset, count in entry.stretches(PIECE_BYTES):
        stretch = torch.zeros(count * step, dtype=torch.uint8)
        file.seek(offset)
        _fill(name, entry, file, stretch[: (count - 1) * step + run])
        runs = stretch.view(count, step)[:, :run]
        room[: count * run].view(count, run).copy_(runs)
        room = room[count * run :]


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """Return name → entry of one file that the safetensors library finds consistent."""
    try:
        with path.open("rb") as file:
            with safe_open(path, framework="pt"):
                pass
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except OSError as error:
        raise _unreadable(path, error) from error
    except (SafetensorError, ValueError, RecursionError) as error:
        with path.open("rb") as file:
            if is_lfs_pointer(file.read(len(LFS_START))):
                raise SourceModelError(pointer_advice(path)) from error
        raise SourceModelError(
            f"`{path}` is not a whole safetensors file ({error}); fetch it again"
        ) from error
    header.pop("__metadata__", None)
    data = _LENGTH_BYTES + length
    return {
        name: TensorEntry(
            path=path,
            dtype=value["dtype"],
            shape=tuple(value["shape"]),
            offset=data + value["data_offsets"][0],
            nbytes=value["data_offsets"][1] - value["data_offsets"][0],
        )
        for name, value in header.items()
    }


def _unreadable(path: Path, error: OSError) -> SourceModelError:
    return SourceModelError(
        f"cannot read `{path}`: {error.strerror or error}; check the file and its permissions"
    )
