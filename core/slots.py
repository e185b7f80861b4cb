"""Device slots: each process takes one of them and keeps it until it ends, however it ends.

A slot is a locked file named after a device. The kernel unlocks what a killed process held, so the
process that takes its place finds its slot free.
"""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from exl2flow.core.errors import WorkDirBusy

_taken: dict[Path, IO[str]] = {}  # folder → the slot file that this process has locked


class Slots:
    """The slots in a folder of one host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def offer(self, devices: Iterable[str]) -> None:
        """Make a slot for each device, named as in `CUDA_VISIBLE_DEVICES`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for device in devices:
            (self.folder / device).touch()

    def take(self) -> str:
        """Return the device of this process, and make it the only one that CUDA will see.

        Raises:
            WorkDirBusy: other processes have all slots.
        """
        if self.folder not in _taken:
            _taken[self.folder] = self._lock_one()
        device = Path(_taken[self.folder].name).name
        os.environ["CUDA_VISIBLE_DEVICES"] = device
        return device

    def _lock_one(self) -> IO[str]:
        for path in sorted(self.folder.iterdir()):
            file = path.open("r+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            return file
        raise WorkDirBusy(f"no device is free in `{self.folder}`; ask for fewer `--workers`")

    def owners(self) -> list[int]:
        """Return the ids of the processes that hold a slot."""
        found = []
        for path in self.folder.iterdir():
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found += [int(text)] if (text := file.read()) else []
        return found
