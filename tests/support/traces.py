"""What lies on the disk: what a run left there, and ways to spoil it."""

import hashlib
import os
from pathlib import Path


def identity(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written again, even with the same content."""
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the identity of all files and folders below `folder`; locks, which say who, aside."""
    paths = (p for p in folder.rglob("*") if p.name != "lock" and p.parent.name != "locks")
    return {str(path.relative_to(folder)): identity(path) for path in paths}


def contents(folder: Path) -> dict[str, str]:
    """Return the sha256 of all files below `folder`, hidden ones included."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def leftovers(folder: Path) -> list[Path]:
    """Return files below `folder` that were begun and not finished."""
    return list(folder.rglob(".*.partial"))


def delete(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def truncate(path: Path) -> None:
    """Cut a file in half."""
    os.truncate(path, path.stat().st_size // 2)


def alter(path: Path) -> None:
    """Change a byte in the middle, and set the file's time back as if nothing had happened."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
