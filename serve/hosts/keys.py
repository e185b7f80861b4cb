"""Keys of clients: read from a file, which may change while the server runs."""

import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.store.files import replacing
from exl2flow.serve.errors import ApiError

log = logging.getLogger("exl2flow.serve")
WAITING = 16  # requests of a key that wait


@dataclass(frozen=True, slots=True)
class Key:
    """A client's key: its name, and its SHA-256.

    running: its texts that are generated at once; waiting: its requests that wait; None: any.
    """

    name: str
    digest: bytes = b""
    is_admin: bool = False
    running: int | None = None
    waiting: int | None = WAITING

    def check_admin(self) -> None:
        """Raise 403 unless the client may change what is loaded."""
        if not self.is_admin:
            why = f"the key {self.name!r:.80} is not an admin's"
            raise ApiError(403, f"{why}; use one with `admin`")


class _Row(BaseModel):
    """A table `key` of the file."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w .@-]+$")
    key: str = ""
    sha256: str = Field("", pattern="^([0-9a-fA-F]{64})?$")
    admin: bool = False
    running: int | None = Field(None, ge=1)
    waiting: int = Field(WAITING, ge=0)

    @property
    def owner(self) -> Key:
        """The key that the row describes."""
        if bool(self.key) == bool(self.sha256):
            raise ValueError("give one of `key` and `sha256`")
        digest = bytes.fromhex(self.sha256) or digest_of(self.key)
        return Key(self.name, digest, self.admin, self.running, self.waiting)


def digest_of(plain: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(plain.encode()).digest()


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file.

    Raises:
        ConfigError: others may read it, or it is not a list of tables `key`; names row and field.
    """
    rows, found = _tables(path), list[Key]()
    for number, row in enumerate(rows, 1):
        try:
            key = _Row.model_validate(row).owner
            for other in found:
                if key.name == other.name or key.digest == other.digest:
                    raise ValueError(f"{other.name!r} is there before, by name or key")
        except ValidationError as error:
            problem = error.errors()[0]
            field = "".join(f"`{part}`: " for part in problem["loc"])
            why = f"[[key]] {number} in `{path}`: {field}{problem['msg']}"
            raise ConfigError(why) from error
        except ValueError as error:
            raise ConfigError(f"[[key]] {number} in `{path}`: {error}") from error
        found.append(key)
    if not found:
        raise ConfigError(f"`{path}` has no [[key]]; `--new-key NAME` adds one")
    return tuple(found)


def _tables(path: Path) -> list[Any]:
    try:
        with path.open("rb") as file:
            if mode := stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                why = f"others may use the keys in `{path}` (mode {mode:03o})"
                raise ConfigError(f"{why}; run `chmod 600 {path}`")
            whole = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the keys in `{path}`: {words.cause(error)}") from error
    rows = whole.pop("key", [])
    if whole or not isinstance(rows, list):
        why = f"`{path}` has `{next(iter(whole), 'key')}`"
        raise ConfigError(f"{why}; it takes tables [[key]] only")
    return rows


def add_key(path: Path, name: str) -> str:
    """Add a key to a file, which is made if need be, and return it; the file has its digest only.

    Raises:
        ConfigError: the name is taken, or the file cannot be read.
        WriteFailed: it cannot be written.
    """
    is_there = path.exists()
    if is_there and name in [key.name for key in read_keys(path)]:
        raise ConfigError(f"`{path}` has a key {name!r:.80}; choose another name")
    plain = secrets.token_urlsafe(32)
    row = {"name": name, "sha256": digest_of(plain).hex()}
    try:
        _Row.model_validate(row)
    except ValidationError as error:
        why = "take up to 64 letters, digits, spaces and . _ @ -"
        raise ConfigError(f"`{name:.80}` is not a name of a key; {why}") from error
    lines = ["[[key]]", *(f"{field} = {json.dumps(value)}" for field, value in row.items()), ""]
    before = path.read_text(encoding="utf-8").rstrip() + "\n\n" if is_there else ""
    with replacing(path, is_private=True) as file:
        file.write((before + "\n".join(lines)).encode())
    return plain


class Keys:
    """The keys that open a server: of the environment, and of a file."""

    def __init__(self, path: Path | None = None, own: str | None = None) -> None:
        """Read a file; own: a key that is not in it, an admin's.

        Raises:
            ConfigError: see `read_keys`.
        """
        self._path = path
        self._own = () if own is None else (Key("environment", digest_of(own), is_admin=True),)
        self._all = self._own
        self.reread()

    def __len__(self) -> int:
        return len(self._all)

    def reread(self) -> None:
        """Read the file again; keys stay as they are if it is broken.

        Raises:
            ConfigError: see `read_keys`.
        """
        if self._path is not None:
            self._seen = _state(self._path)
            self._all = (*self._own, *read_keys(self._path))

    def look(self) -> None:
        """Read the file again if it has changed; what is wrong with it goes to the log."""
        if self._path is not None and _state(self._path) != self._seen:
            try:
                self.reread()
                log.info("keys read again: %s", ", ".join(key.name for key in self._all))
            except ConfigError as error:
                log.error("keys stay as they were: %s", error)

    def find(self, plain: str) -> Key:
        """Return the key that a client sends.

        Raises:
            ApiError: it is none.
        """
        digest, found = digest_of(plain), None
        for key in self._all:  # all of them, so that times tell nothing
            found = key if hmac.compare_digest(key.digest, digest) else found
        if found is None:
            raise ApiError(401, "no or a wrong key; send `Authorization: Bearer KEY`")
        return found


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
