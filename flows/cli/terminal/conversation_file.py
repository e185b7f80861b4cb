"""The file that keeps a chat's conversation; a lock beside it tells other chats to leave it alone.

The lock is taken before the file is read: otherwise a chat that ends in between could write a turn
that this one has not seen, and would overwrite.
"""

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.conversation import Conversation
from exl2flow.core.store.files import lock


@dataclass(frozen=True)
class ConversationFile:
    """A file that no other chat has while this object lives.

    wanted: the file that the user asked for; another chat has it if `file` is a different one.
    """

    wanted: Path
    file: Path

    @property
    def is_wanted(self) -> bool:
        """Whether this is the file that the user asked for."""
        return self.file == self.wanted

    @classmethod
    def take(cls, file: Path) -> "ConversationFile":
        """Lock a file, or the first one with a number that is free; links are followed."""
        wanted = Path(os.path.realpath(file))
        found, locked = _locked(wanted)
        place = cls(wanted, found)
        if locked is not None:
            weakref.finalize(place, locked.close)
        return place


def _locked(wanted: Path, number: int = 1) -> tuple[Path, BinaryIO | None]:
    """Return a file that no other chat has, and its lock if one can be made."""
    file = wanted if number == 1 else wanted.with_stem(f"{wanted.stem}-{number}")
    try:
        return file, lock(file, fcntl.LOCK_NB)
    except BlockingIOError:
        return _locked(wanted, number + 1)
    except OSError:  # a folder that cannot be written, which is said with the first turn
        return file, None


@contextmanager
def unused(file: Path) -> Iterator[None]:
    """Keep other chats from a file until the block ends, if any chat has ever had it.

    Raises:
        ConfigError: another chat has it.
    """
    real = Path(os.path.realpath(file))
    try:
        has_lock = Path(f"{real}.lock").exists()  # others get none, which would stay there
        held = lock(real, fcntl.LOCK_NB) if has_lock else nullcontext()
    except BlockingIOError:
        raise ConfigError(f"another chat has `{file}`; choose another file") from None
    except OSError:  # a folder that cannot be written, which writing the file reports
        held = nullcontext()
    with held:
        yield


def put_aside(file: Path) -> None:
    """Rename the file of another conversation to the first name that is free."""
    with suppress(ConfigError):  # whatever else it holds is put aside, too
        if not Conversation.read(file).turns:
            return
    aside, number = file.with_suffix(".previous.json"), 1
    while aside.exists():
        number += 1
        aside = file.with_suffix(f".previous-{number}.json")
    with suppress(OSError):
        file.replace(aside)
