"""Find files whose content changed while size and times did not, as on a faulty disk.

Size and times are compared at every use. Contents are read once per process: those of a stage's
inputs before it begins, and its own when it resumes.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exl2flow.core.errors import CorruptCheckpoint
from exl2flow.core.store.files import digest, unreadable
from exl2flow.core.store.source import READERS
from exl2flow.core.store.store import MANIFEST, StageFolder

OUTPUT = "compile"  # the stage that writes it
log = logging.getLogger(__name__)

_trusted: set[Path] = set()  # stages that this process finished, or compared with their digests


def trust(folder: Path) -> None:
    """Do not read a stage's files again to compare them: this process has just written them."""
    _trusted.add(folder)


def distrust() -> None:
    """Compare all files again, as another process does."""
    _trusted.clear()


def altered(folder: StageFolder) -> list[str]:
    """Return the files that are as recorded by size and times, but not by digest.

    Raises:
        ReadFailed: a file is there but cannot be read.
    """
    if folder.path in _trusted:
        return []
    records = folder.manifest.files
    names = [name for name, record in records.items() if record.sha256 and folder.valid(name)]
    with ThreadPoolExecutor(READERS, thread_name_prefix="exl2flow-digest") as threads:
        digests = threads.map(_digest, [folder.path / name for name in names])
        return [n for n, sha256 in zip(names, digests, strict=True) if sha256 != records[n].sha256]


def _digest(path: Path) -> str:
    try:
        return digest(path)
    except OSError as error:
        raise unreadable(path, error) from error


def check_input(folder: StageFolder) -> None:
    """Check a finished stage that another one is about to read.

    Raises:
        CorruptCheckpoint: a file differs from what the stage wrote.
    """
    if names := [f"`{folder.path / name}`" for name in altered(folder)]:
        raise CorruptCheckpoint(
            f"{', '.join(names)}: not what stage `{folder.manifest.stage}` wrote, although size "
            "and times are; the disk or memory is faulty: delete it and repeat the command"
        )
    trust(folder.path)


def check_output(out: Path, work_root: Path) -> None:
    """Compare the files of an output folder with the digests in a work root.

    Raises:
        CorruptCheckpoint: a file differs.
    """
    for path in work_root.glob(f"*/{OUTPUT}/*/{MANIFEST}"):
        folder = StageFolder.load(path.parent)
        if folder and any(Path(name).parent == out.resolve() for name in folder.manifest.files):
            check_input(folder)


def forget_damaged(folder: StageFolder) -> None:
    """Let a stage that resumes make damaged files again."""
    for name in altered(folder):
        log.warning("`%s` is damaged and made again", folder.path / name)
        del folder.manifest.files[name]
