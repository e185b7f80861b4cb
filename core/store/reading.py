"""Keep conversions out of finished outputs while these are read as a whole.

A conversion holds the exclusive lock of its output folder itself. Readers share it, so any number
of them read at once, and they need no work root.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from exl2flow.core.errors import WorkDirBusy


@contextmanager
def reading(folders: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of output folders as a reader.

    Raises:
        WorkDirBusy: a conversion is writing into one of them.
    """
    with ExitStack() as stack:
        for folder in dict.fromkeys(folder.resolve() for folder in folders):
            if folder.is_dir():
                handle = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, handle)
                _share(handle, folder)
        yield


def _share(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WorkDirBusy(
            f"another process is writing into `{folder}`; wait for it, or stop it"
        ) from None
    except OSError:  # a file system that locks no folders
        return
