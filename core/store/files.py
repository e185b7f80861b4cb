"""Files that are either whole or absent: written to a temporary file, flushed, renamed.

A file's identity is its sha256; `FileRecord` remembers it beside size, mtime and ctime, so that an
untouched file is recognized without reading it (ctime cannot be set back by a program).
"""

import fcntl
import glob
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from exl2flow.core import words
from exl2flow.core.errors import CorruptCheckpoint, ReadFailed, WriteFailed

TEMPORARY_SUFFIX = ".partial"
DAMAGE = (FileNotFoundError, NotADirectoryError, ValueError, RecursionError, SafetensorError)
PRIVATE, USUAL = 0o600, 0o666  # permissions of new files; the umask takes from them
JSON_PIECES = 4096  # pieces of JSON text in memory at a time
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
}
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class FileRecord(BaseModel):
    """State of a file when it was committed; `sha256` is None if it is cheap to make again."""

    model_config = ConfigDict(frozen=True, strict=True)  # fields of newer versions are ignored

    sha256: str | None
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path, *, sha256: str | None) -> "FileRecord":
        """Return the record of an existing file whose digest the caller knows."""
        stat = path.stat()
        return cls(
            sha256=sha256, size=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns
        )

    def matches(self, path: Path) -> bool:
        """Return whether `path` is as recorded; it is read only if its times differ.

        Raises:
            ReadFailed: the file is there but cannot be read.
        """
        try:
            now = FileRecord.of(path, sha256=self.sha256)
            if now == self:
                return True
            return now.size == self.size and self.sha256 is not None and digest(path) == self.sha256
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return False  # ValueError: no file can have this name
        except OSError as error:
            raise unreadable(path, error) from error


def digest(path: Path) -> str:
    """Return the sha256 of a file as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: object) -> str:
    """Return the sha256 of a JSON-serializable value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(_encoded(text)).hexdigest()


def _encoded(text: str) -> bytes:
    """Return JSON text as UTF-8; a file name's byte that is not UTF-8 becomes a JSON escape."""
    return text.encode(errors="backslashreplace")


def unreadable(path: Path, error: OSError) -> ReadFailed:
    """Return the error for a file that is there but cannot be read."""
    return ReadFailed(
        f"cannot read `{path}`: {error.strerror or error}; check the disk, the network share and "
        "the permissions, then repeat the command"
    )


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, so that it survives a power cut.

    Raises:
        WriteFailed: the disk is full or faulty.
    """
    with naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Flush files that another library wrote, and their folders.

    Raises:
        WriteFailed: the disk is full or faulty.
    """
    files = list(paths)
    for path in (*files, *{path.parent for path in files}):
        sync(path)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents unless they exist; new ones survive a power cut."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        if os.access(path.parent, os.R_OK):
            sync(path.parent)


def make_private_folder(folder: Path) -> None:
    """Create a folder unless it exists; nobody but its owner can look into it."""
    make_folder(folder)
    folder.chmod(0o700)


class Writer:
    """The binary file that `replacing` yields; its errors name the file that is replaced."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    def write(self, data: Any, /) -> int:
        """Write bytes or a buffer."""
        with naming(self._path):
            return self._file.write(data)


@contextmanager
def replacing(path: Path, *, is_private: bool = False) -> Iterator[Writer]:
    """Open a file that replaces `path` when the block ends without an error.

    Several writers may run at the same time: the last to finish wins, nobody reads half a file.
    A private file can be read by its owner only, or has the permissions of the one it replaces.

    Raises:
        WriteFailed: the disk is full, a size limit is reached or permissions forbid it.
    """
    with naming(path):
        make_folder(path.parent)
        file = _temporary(path, PRIVATE if is_private else USUAL)
    if is_private:
        with suppress(OSError):  # there is none yet
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
    try:
        yield Writer(file, path)
        with naming(path):
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)  # while it is locked
            sync(path.parent)
    except BaseException:
        with suppress(OSError):  # what prevented writing may prevent this, too
            Path(file.name).unlink()
        raise
    finally:
        with suppress(OSError):  # of what could not be flushed
            file.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors of writing a file into ones that name it, and its folder if that is missing.

    Raises:
        WriteFailed: the disk is full, a size limit is reached, permissions forbid it, or there is
            no such folder.
    """
    try:
        yield
    except OSError as error:
        why, advice = words.cause(error), "free space or fix the permissions"
        if isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError):
            advice = "choose another place"
            if not path.parent.is_dir():
                why = f"`{path.parent}` is not a folder"
        raise WriteFailed(f"cannot write `{path}`: {why}; {advice}") from error


def _temporary(path: Path, mode: int) -> BinaryIO:
    """Create a locked temporary file beside `path`; delete those of killed writers."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY_SUFFIX}"):
        with suppress(OSError), old.open("rb") as leftover:
            fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while it is written
            old.unlink()
    while True:
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        file = open(aside, "xb", opener=partial(os.open, mode=mode))  # noqa: SIM115  # returned
        with suppress(OSError):  # a file system without locks: nobody deletes it
            fcntl.flock(file, fcntl.LOCK_EX)
        if aside.exists():
            return file
        file.close()  # another writer took it for a leftover before it was locked


def lock(path: Path, how: int = 0) -> BinaryIO:
    """Return the lock file beside `path`; the lock is held until it is closed.

    Raises:
        BlockingIOError: another process has the lock, and `how` is `fcntl.LOCK_NB`.
    """
    make_folder(path.parent)
    file = path.with_name(f"{path.name}.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | how)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # a file system without locks
    return file


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for the lock of a file that several processes read, change and write.

    Raises:
        WriteFailed: the lock file beside it cannot be made.
    """
    with naming(path):
        file = lock(path)
    with file:
        yield


def write_json(
    path: Path, value: object, *, is_private: bool = False, indent: int | None = 4
) -> str:
    """Write a JSON file atomically, and return its sha256; see `replacing`."""
    pieces = chain(json.JSONEncoder(indent=indent, ensure_ascii=False).iterencode(value), "\n")
    sha = hashlib.sha256()
    with replacing(path, is_private=is_private) as file:
        while some := _encoded("".join(islice(pieces, JSON_PIECES))):
            sha.update(some)
            file.write(some)
    return sha.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with replacing(path) as file:
        file.write(_encoded(text))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file of our own into named ones."""
    try:
        yield
    except DAMAGE as error:
        raise CorruptCheckpoint(
            f"cannot read `{path}`: {words.cause(error)}; delete it and repeat"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path, *, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Read a JSON file; `hook` replaces each object in it, inner ones first.

    Raises:
        CorruptCheckpoint: the file is missing or not JSON.
        ReadFailed: it is there but cannot be read.
    """
    with _reading(path):
        return json.loads(path.read_bytes(), object_hook=hook)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's little-endian bytes, without a copy if it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def safetensors_header(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """Return the length word and JSON header of a safetensors file with tensors in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in layout.items():
        size = dtype.itemsize
        for axis in shape:
            size *= axis
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_layout(
    path: Path,
    layout: Layout,
    tensors: Iterable[torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file atomically, one tensor in memory at a time; return its sha256.

    Another thread computes the hash.

    Args:
        path: the file.
        layout: name → (dtype, shape), in the order of `tensors`.
        tensors: the contents, consumed one by one.
        metadata: text for the header.
    """
    sha = hashlib.sha256()
    with replacing(path) as file, ThreadPoolExecutor(1) as hashing:
        header = safetensors_header(layout, metadata or {})
        sha.update(header)
        file.write(header)
        for (name, expected), tensor in zip(layout.items(), tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != expected:
                raise AssertionError(f"`{name}` is not laid out as planned: {expected}")
            data = tensor_bytes(tensor)
            hashed = hashing.submit(sha.update, data)
            file.write(data)
            hashed.result()  # so that no more than one tensor waits for its hash
    return sha.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> str:
    """Write tensors in memory as a safetensors file atomically, and return its sha256."""
    layout = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    return write_layout(path, layout, tensors.values(), metadata=metadata)


def read_metadata(path: Path) -> dict[str, str]:
    """Read the text entries in the header of a safetensors file of our own.

    Raises:
        CorruptCheckpoint: the file is missing, truncated or not safetensors.
        ReadFailed: it is there but cannot be read.
    """
    with _reading(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a whole safetensors file of our own into memory.

    Raises:
        CorruptCheckpoint: the file is missing, truncated or not safetensors.
        ReadFailed: it is there but cannot be read.
    """
    with _reading(path):
        return load_file(path)
