"""`PageFiles`: pages of prompts as files, which processes may share. Any doubt is a miss.

`FOLDER/namespace/ab/key.page` is a header, the ids and the stored bytes of a page, and their
HMAC-SHA256 with the key `FOLDER/secret`: who cannot read the secret cannot plant a page. Nothing is
flushed, for a torn file fails its digest. Files never change; their times tell when they were
used last.
"""

import hmac
import logging
import os
import secrets
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from struct import pack

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.prefix_tree import ID_BYTES, FullPage

MAGIC, SCHEMA = b"exl2page", 2
SECRET, SECRET_BYTES, DIGEST_BYTES, KEY_BYTES = "secret", 32, 32, 16
NAME_LENGTH = 32  # of a namespace
OLD_SECONDS = 600  # after which nobody writes a temporary file any more
SHARE = 16  # the folder is looked through after this part of its size was written
log = logging.getLogger(__name__)


class PageFiles:
    """The pages of one namespace in a folder; `size`: bytes of all its namespaces at most.

    Any thread may look and read; one writes. is_off: whether writing has failed. used: bytes in the
    folder, as far as this process knows.
    """

    def __init__(self, folder: Path, namespace: str, *, size: int) -> None:
        """Make the folder, or take one that was made before.

        Raises:
            ConfigError: it holds other things, others may read it, or it cannot be used.
        """
        self._root, self._folder, self._size = folder, folder / namespace, size
        self._head = MAGIC + pack("<I", SCHEMA) + namespace.encode()
        self._secret = secret_of(folder)
        self.is_off, self.used, self._written = False, 0, 0
        self._trim(0)

    def has(self, page: FullPage) -> bool:
        """Return whether there is a file for a page, good or not."""
        return self._path(page.key).is_file()

    def read(self, page: FullPage, out: memoryview) -> bool:
        """Fill `out` with the bytes of a page; False: they are not there, or a file was wrong.

        A wrong file is deleted.
        """
        path = self._path(page.key)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            with open(handle, "rb", buffering=0) as file:
                is_good = self._fill(file.fileno(), page, out)
            if not is_good:
                log.warning("`%s` is damaged or not ours; it is deleted", path)
                path.unlink()
        except OSError:
            return False
        return is_good

    def touch(self, page: FullPage) -> None:
        """Note that a page is used."""
        with suppress(OSError):
            os.utime(self._path(page.key))

    def write(self, page: FullPage, data: memoryview) -> None:
        """Write a page unless it is there; the least recently used ones go for it.

        If the disk is full or faulty, nothing is written from then on.
        """
        head, path = self._head_of(page, len(data)), self._path(page.key)
        nbytes = len(head) + len(data) + DIGEST_BYTES
        if self.is_off or nbytes > self._size:
            return
        if self.has(page):
            self.touch(page)
            return
        if self.used + nbytes > self._size or self._written > self._size // SHARE:
            self._trim(nbytes)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        try:
            for one in (self._folder, path.parent):  # but not the root, which needs its secret
                with suppress(FileExistsError):
                    one.mkdir(mode=0o700)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "wb", buffering=0) as file:
                for part in (head, data, self._digest(head, data)):
                    _write_all(file.fileno(), memoryview(part))
            temporary.replace(path)
        except FileNotFoundError:
            return  # another process clears the folder
        except OSError as error:
            self.is_off = True
            log.warning(
                "no further pages are kept in `%s`: %s; they are read as before",
                self._root,
                words.cause(error),
            )
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        self.used += nbytes
        self._written += nbytes

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete the files of pages, and of all that follow them."""
        following, gone = defaultdict[bytes, list[bytes]](list), list(keys)
        for entry in _entries(self._folder):
            for file in _entries(Path(entry.path)):
                if parts := self._links_of(file.path):
                    key, before = parts
                    following[before].append(key)
        for key in gone:  # which grows
            gone += following.pop(_link(key), ())
            with suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def _links_of(self, path: str) -> tuple[bytes, bytes] | None:
        """Return the key that a file states, and the link to the page before it."""
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            head = file.read(len(self._head) + 2 * KEY_BYTES)
            if len(head) == len(self._head) + 2 * KEY_BYTES:
                return head[-2 * KEY_BYTES : -KEY_BYTES], head[-KEY_BYTES:]
        return None

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.page"

    def _head_of(self, page: FullPage, nbytes: int) -> bytes:
        """Return what a page's file must begin with; salts are not stored."""
        counts = pack("<IQ", len(page.content) // ID_BYTES, nbytes)
        return self._head + page.key + _link(page.before) + counts + page.content

    def _digest(self, head: bytes, data: memoryview) -> bytes:
        """Return the digest; processors have instructions for it, and it needs no GIL."""
        digest = hmac.new(self._secret, head, "sha256")
        digest.update(data)
        return digest.digest()

    def _fill(self, handle: int, page: FullPage, out: memoryview) -> bool:
        wanted = self._head_of(page, len(out))
        size = len(wanted) + len(out) + DIGEST_BYTES
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or state.st_size != size:
            return False
        head, end = bytearray(len(wanted)), bytearray(DIGEST_BYTES)
        if not all(_read_all(handle, memoryview(part)) for part in (head, out, end)):
            return False
        return head == wanted and hmac.compare_digest(end, self._digest(wanted, out))

    def _trim(self, room: int) -> None:
        """Look through the folder, and delete the least recently used files that are too many."""
        found = sorted(_files(self._root))
        self.used, self._written = sum(size for _, size, _ in found), 0
        for _, size, path in found:
            if self.used + room <= self._size:
                return
            with suppress(OSError):
                os.unlink(path)
            self.used -= size


def _link(before: bytes) -> bytes:
    """Return what a page's file says of the page before it."""
    return blake2b(before, digest_size=KEY_BYTES).digest()


def clear(folder: Path) -> None:
    """Delete all pages in a folder, but not its secret.

    Raises:
        ConfigError: the folder holds something other than pages, or cannot be changed.
    """
    if not folder.exists():
        return
    secret_of(folder)
    try:
        for one in _namespaces(folder):
            shutil.rmtree(one)
    except OSError as error:
        raise ConfigError(f"cannot clear `{folder}`: {words.cause(error)}") from error


def secret_of(folder: Path) -> bytes:
    """Return the secret of a folder, which is made if need be, the folder too.

    Raises:
        ConfigError: the folder holds something other than pages, can be read by others, or cannot
            be used.
    """
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        path, there = folder / SECRET, os.listdir(folder)
        if SECRET not in there:
            if others := [name for name in there if not name.startswith(SECRET)]:
                raise ConfigError(
                    f"`{folder}` holds other things, such as `{others[0]}`; give `--cache-disk` a "
                    "folder of its own"
                )
            folder.chmod(0o700)
            _make_secret(path)
        for one in (folder, path):
            state = one.lstat()
            if state.st_mode & 0o077 or state.st_uid != os.geteuid():
                raise ConfigError(
                    f"`{one}` can be read by others or is not yours, and pages hold prompts; run "
                    f"`chmod go= {one}` or give another folder"
                )
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"`--cache-disk`: cannot use `{folder}`: {words.cause(error)}; give another folder"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"`{path}` is damaged; delete `{folder}`, which is made anew")
    return secret


def _make_secret(path: Path) -> None:
    """Make the secret, whole at once; the first of several processes makes it."""
    temporary = path.with_name(f"{SECRET}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(handle)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _namespaces(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if len(path.name) == NAME_LENGTH and path.is_dir()]


def _files(root: Path) -> Iterator[tuple[int, int, str]]:
    """Yield time, bytes and path of all pages; temporary files that nobody writes are deleted."""
    oldest = time.time_ns() - OLD_SECONDS * 10**9
    for entry in (one for name in _namespaces(root) for one in _entries(name)):
        for file in _entries(Path(entry.path)):
            with suppress(OSError):  # another process deleted it
                state = file.stat(follow_symlinks=False)
                if file.name.endswith(".partial") and state.st_mtime_ns < oldest:
                    os.unlink(file.path)
                else:
                    yield state.st_mtime_ns, state.st_size, file.path


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except OSError:  # it is gone, or no folder
        return []


def _write_all(handle: int, part: memoryview) -> None:
    while part:
        part = part[os.write(handle, part) :]


def _read_all(handle: int, part: memoryview) -> bool:
    """Fill a buffer; False: the file is too short."""
    while part:
        count = os.readv(handle, [part])
        if not count:
            return False
        part = part[count:]
    return True
