"""The file that keeps a chat's conversation; a lock beside it tells other chats to leave it alone.

The lock is taken before the file is read: otherwise a chat that ends in between could write a turn
that this one has not seen, and would overwrite.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.conversation import Conversation
from exl2flow.core.store.files import lock


def _locked(file: Path) -> AbstractContextManager[object] | None:
    """Return the lock of a file, None if another chat has it."""
    try:
        return lock(file, fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:  # a folder that cannot be written, which writing the file reports
        return nullcontext()


@contextmanager
def reserved(file: Path) -> Iterator[Path]:
    """Keep other chats from a file, or from the first one with a number that is free; yield it.

    Links are followed.
    """
    wanted = Path(os.path.realpath(file))
    free, number = wanted, 1
    while (lock_file := _locked(free)) is None:
        number += 1
        free = wanted.with_stem(f"{wanted.stem}-{number}")
    with lock_file:
        yield free


@contextmanager
def unused(file: Path) -> Iterator[None]:
    """Keep other chats from a file until the block ends, if any chat has ever had it.

    Raises:
        ConfigError: another chat has it.
    """
    real = Path(os.path.realpath(file))
    has_lock = os.path.exists(f"{real}.lock")  # others get none, which would stay there
    lock_file = _locked(real) if has_lock else nullcontext()
    if lock_file is None:
        raise ConfigError(f"another chat has `{file}`; choose another file")
    with lock_file:
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
