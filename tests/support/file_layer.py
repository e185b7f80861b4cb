"""A layer between the program and the file system: it sees every call on files below a folder.

`open`, and the functions of `os` that change files, are replaced while a block runs, so that all
of Python's libraries pass through it. Programs in other languages, as the reader of safetensors,
do not; they only read.
"""

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

READ, OPEN, MAKE, WRITE, CUT, SYNC, RENAME, REMOVE, FOLDER = KINDS = (
    "read",
    "open",
    "make",
    "write",
    "cut",
    "sync",
    "rename",
    "remove",
    "folder",
)
REAL = {
    name: getattr(os, name)
    for name in (
        "open",
        "write",
        "pwrite",
        "ftruncate",
        "fsync",
        "replace",
        "rename",
        "unlink",
        "mkdir",
        "rmdir",
    )
}
REAL_OPEN = io.open


class Layer:
    """Sees calls; subclasses refuse or record them."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.lock = threading.RLock()  # a change is seen before anyone can build on it

    def before(self, kind: str, path: str, size: int = 0) -> int:
        """See a call that is about to happen; return how many of its bytes it may write.

        Raises:
            OSError: it fails.
        """
        return size

    def after(self, kind: str, path: str, **details: Any) -> None:
        """See a call that has changed something."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what the block does, in all threads."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (io, builtins):
                patch.setattr(module, "open", self._open)
            for name in REAL:
                patch.setattr(os, name, getattr(self, f"_os_{name}"))
            patch.setattr(os, "remove", self._os_unlink)
            yield

    def inside(self, file: Any, folder: int | None = None) -> str | None:
        """Return the absolute path of a file or descriptor, None if it is not below the root."""
        try:
            if isinstance(file, int):
                path = os.readlink(f"/proc/self/fd/{file}")
            else:
                path = os.fsdecode(file)
                base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else None
                path = os.path.join(base, path) if base else os.path.abspath(path)
        except (OSError, TypeError):
            return None
        return path if path.startswith(self.root + "/") or path == self.root else None

    def _open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = self.inside(file)
        if path is None:
            return REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _File(self, path, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = (
            io.BufferedRandom(raw, size)
            if "+" in mode
            else io.BufferedReader(raw, size)
            if raw.readable()
            else io.BufferedWriter(raw, size)
        )
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        found = self.inside(path, dir_fd)
        if found is None:
            return int(REAL["open"](path, flags, mode, dir_fd=dir_fd))
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(found)
        self.before(MAKE if is_new else OPEN, found)
        with self.lock:
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(found)
            handle = int(REAL["open"](path, flags, mode, dir_fd=dir_fd))
            if is_new:
                self.after(MAKE, found)
            if flags & os.O_TRUNC:
                self.after(CUT, found, size=0)
        return handle

    def _written(self, handle: int, data: Any, offset: int, write: Callable[[Any], int]) -> int:
        path = self.inside(handle)
        if path is None:
            return write(data)
        some = memoryview(data).cast("B")[: self.before(WRITE, path, len(data))]
        with self.lock:
            size = write(some)
            self.after(WRITE, path, offset=offset, data=bytes(data[:size]))
        return size

    def _os_write(self, handle: int, data: Any) -> int:
        path = self.inside(handle)
        offset = os.lseek(handle, 0, os.SEEK_CUR) if path else 0
        return self._written(handle, data, offset, lambda some: int(REAL["write"](handle, some)))

    def _os_pwrite(self, handle: int, data: Any, offset: int) -> int:
        def write(some: Any) -> int:
            return int(REAL["pwrite"](handle, some, offset))

        return self._written(handle, data, offset, write)

    def _changed(self, kind: str, name: str, file: Any, *arguments: Any, **details: Any) -> Any:
        """Do a call on one path or descriptor that has no result."""
        folder = details.pop("dir_fd", None)
        path = self.inside(file, folder)
        given = {} if folder is None else {"dir_fd": folder}
        if path is None:
            return REAL[name](file, *arguments, **given)
        self.before(kind, path)
        with self.lock:
            REAL[name](file, *arguments, **given)
            self.after(kind, path, **details)
        return None

    def _os_ftruncate(self, handle: int, length: int) -> None:
        self._changed(CUT, "ftruncate", handle, length, size=length)

    def _os_fsync(self, handle: Any) -> None:
        self._changed(SYNC, "fsync", handle if isinstance(handle, int) else handle.fileno())

    def _os_unlink(self, path: Any, *, dir_fd: Any = None) -> None:
        self._changed(REMOVE, "unlink", path, dir_fd=dir_fd)

    def _os_rmdir(self, path: Any, *, dir_fd: Any = None) -> None:
        self._changed(REMOVE, "rmdir", path, dir_fd=dir_fd)

    def _os_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        self._changed(FOLDER, "mkdir", path, mode, dir_fd=dir_fd)

    def _moved(self, name: str, source: Any, target: Any) -> None:
        begin, end = self.inside(source), self.inside(target)
        if begin is None or end is None:
            assert begin is end, f"moved across the border: {source} {target}"
            REAL[name](source, target)
            return
        self.before(RENAME, end)
        with self.lock:
            REAL[name](source, target)
            self.after(RENAME, end, source=begin)

    def _os_replace(self, source: Any, target: Any) -> None:
        self._moved("replace", source, target)

    def _os_rename(self, source: Any, target: Any) -> None:
        self._moved("rename", source, target)


class _File(io.FileIO):
    """An unbuffered file whose reads and writes the layer sees."""

    def __init__(
        self, layer: Layer, path: str, file: Any, mode: str, closefd: bool, opener: Any
    ) -> None:
        self._layer, self._path = layer, path
        self._appends = mode.startswith("a")
        if opener is not None:  # it calls `os.open`, which is watched as well
            super().__init__(file, mode, closefd, opener)
            return
        is_new = not mode.startswith("r") and not os.path.lexists(path)
        if not isinstance(file, int):
            layer.before(MAKE if is_new else OPEN, path)
        with layer.lock:
            is_new = not mode.startswith("r") and not os.path.lexists(path)
            super().__init__(file, mode, closefd)
            if is_new:
                layer.after(MAKE, path)
            elif mode.startswith("w"):
                layer.after(CUT, path, size=0)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        some = view[: self._layer.before(WRITE, self._path, len(view))]
        with self._layer.lock:
            offset = os.fstat(self.fileno()).st_size if self._appends else self.tell()
            size = super().write(some)
            path = self._layer.inside(self.fileno()) or self._path
            self._layer.after(WRITE, path, offset=offset, data=bytes(view[:size]))
        return size

    def truncate(self, size: int | None = None) -> int:
        self._layer.before(CUT, self._path)
        with self._layer.lock:
            length = super().truncate(size)
            self._layer.after(CUT, self._layer.inside(self.fileno()) or self._path, size=length)
        return length

    def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
        self._layer.before(READ, self._path)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._layer.before(READ, self._path)
        return super().readall()
