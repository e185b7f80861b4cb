"""Device slots of this host: a process holds one while it computes, others wait.

A slot is a locked file named after a device. The kernel releases the lock of a killed process, so
the slot is free again. All processes of a user share the folder.
"""

import fcntl
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO
from urllib.parse import quote

import torch

from exl2flow.core.device_name import index_of
from exl2flow.core.errors import WriteFailed
from exl2flow.core.runtime.interrupt import look

log = logging.getLogger(__name__)

VARIABLE = "CUDA_VISIBLE_DEVICES"
_devices: dict[Path, str] = {}  # folder → the device that this process stays with
_choosing = threading.Lock()
_gpu = threading.RLock()  # of the thread that works on this process's GPU
WAIT_SECONDS = 0.2  # between attempts to hold a device
TURN_SECONDS = 0.5  # between looks at a stop request while another thread has the GPU


def visible_gpus(device: str) -> list[str]:
    """Return the names of the GPUs that this process may use, without initializing CUDA."""
    count = 0 if device == "cpu" else torch.cuda.device_count()
    seen, names = os.environ.get(VARIABLE), [str(index) for index in range(count)]
    if seen is not None and count:
        names = [name.strip() for name in seen.split(",") if name.strip()]
    if (index := index_of(device)) is not None:
        names = names[index : index + 1] or names  # the latter where it sees only that one by now
    return names


def see_only(gpu: str) -> None:
    """Restrict CUDA to one GPU. Call before CUDA is initialized."""
    os.environ[VARIABLE] = gpu


@contextmanager
def turn(device: str) -> Iterator[None]:
    """Hold this process's GPU for the block; other threads wait. Those on a CPU never do.

    One that is named by its index is the current device meanwhile.

    What is set for a whole process, such as the precision of its products, then holds for one
    stage only, and memory suffices for one as forecast.

    Raises:
        Interrupted: a signal came while waiting.
    """
    if device == "cpu":
        yield
        return
    while not _gpu.acquire(timeout=TURN_SECONDS):
        look()
    try:
        with nullcontext() if index_of(device) is None else torch.cuda.device(device):
            yield
    finally:
        _gpu.release()


class DeviceLocks:
    """The slots in a folder of one host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_host(cls, kind: str) -> "DeviceLocks":
        """Return this user's slots on this host for a kind of device, `cuda` or `cpu`."""
        return cls(Path(tempfile.gettempdir()) / f"exl2flow-slots-{os.getuid()}" / kind)

    @contextmanager
    def hold(self, devices: Sequence[str], check: Callable[[], None]) -> Iterator[str]:
        """Hold a device for the block, after waiting until one is free.

        A process keeps its first device, because CUDA would not see a second one.

        Args:
            devices: names as in `CUDA_VISIBLE_DEVICES`, in order of preference.
            check: called before each further attempt; raises to give up.

        Raises:
            WriteFailed: the folder belongs to another user.
        """
        self._make_folder()
        if (file := self._lock(devices)) is None:
            log.info("waiting for one of the devices %s, all in use", ", ".join(devices))
        while file is None:
            check()
            time.sleep(WAIT_SECONDS)
            file = self._lock(devices)
        try:
            yield _devices[self.folder]
        finally:
            file.truncate(0)
            file.close()

    def _make_folder(self) -> None:
        """Create the folder; another user's could hold links to our files."""
        top = self.folder.parent
        top.mkdir(exist_ok=True, mode=0o700)
        status = top.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise WriteFailed(
                f"`{top}` is not a folder of this user; delete it, or set TMPDIR to another place"
            )
        self.folder.mkdir(exist_ok=True)

    def _lock(self, devices: Sequence[str]) -> IO[str] | None:
        """Return the locked file of the first free device, None if other processes hold all."""
        with _choosing:
            chosen = _devices.get(self.folder)
            for device in devices if chosen is None else [chosen]:
                path = self.folder / quote(device, safe="")
                file = path.open("a+")
                # Held by another process, or deleted after it was opened
                with suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                        file.truncate(0)
                        file.write(str(os.getpid()))
                        file.flush()
                        _devices[self.folder] = device
                        return file
                file.close()
        return None

    def owners(self) -> set[int]:
        """Return the ids of the processes that hold a slot."""
        owners = set()
        for path in self.folder.glob("*"):
            with path.open("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    owners |= {int(text)} if (text := file.read()) else set()
        return owners
