"""What a reader of files from strangers is, for a campaign: whole files, damage, and their use."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from mutations import Change, changed_bytes, changed_json

JSON = (changed_json, changed_json, changed_bytes)


class Reader(ABC):
    """A reader: `file` takes an input.

    seeds: whole files. hostile: files to refuse. trial: what a child process does for users.
    """

    file: ClassVar[str]
    changes: ClassVar[Sequence[Change]] = (changed_bytes,)
    trial: Callable[[], AbstractContextManager[None]]

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.path = folder, folder / self.file
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.hostile: Sequence[bytes] = ()
        self.seeds = self.prepare()

    @abstractmethod
    def prepare(self) -> list[bytes]:
        """Write what the folder holds beside the input, and return whole files."""

    def damaged(self, rng: random.Random) -> bytes:
        """Return an input."""
        return rng.choice(self.changes)(rng, rng.choice([*self.seeds, *self.hostile]))

    def read(self, data: bytes) -> None:
        """Use an input; raises what the reader raises."""
        self.path.unlink(missing_ok=True)  # the child of a reader may have been killed
        self.path.write_bytes(data)
        self.use()

    @abstractmethod
    def use(self) -> None:
        """Read the file as commands do."""
