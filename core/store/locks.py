"""Locks on folders themselves, which need no file and hold for runs of every work root."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exl2flow.core.errors import WorkDirBusy
from exl2flow.core.store.files import make_folder


def busy(owner: str, root: Path, out: Path | None = None) -> WorkDirBusy:
    """Return the error for a work root, or an output if given, in which another process works."""
    where, option = (root, "--work-root") if out is None else (out, "--out")
    return WorkDirBusy(
        f"{owner} is working in `{where}`; wait for it, stop it, or choose another `{option}`"
    )


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder itself; a folder that is created and stays empty is removed."""
    is_new = not folder.exists()
    handle = _lock_folder(folder)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(handle)


def _lock_folder(folder: Path) -> int:
    """Return a handle that locks a folder, which is created if it is missing."""
    while True:
        make_folder(folder)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise busy("another process", folder, folder) from None
        except OSError:  # a file system that locks no folders
            return handle
        if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
            return handle
        os.close(handle)  # its owner removed it meanwhile
