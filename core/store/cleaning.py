"""Find and delete checkpoints that no finished conversion needs.

A conversion is finished when its last stage, which no other reads, is complete. For each output
folder the newest finished conversions are kept, with all stages they depend on. The stages of
unfinished conversions are kept unless the caller says otherwise, because a resume would continue
from them.

Folders are renamed while the work directories are locked, and deleted afterwards: no run waits.
"""

import logging
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from exl2flow.core.errors import (
    ConfigError,
    SourceModelError,
    StoreError,
    WorkDirBusy,
    WriteFailed,
)
from exl2flow.core.options.config import RunOptions
from exl2flow.core.store.damage import OUTPUT
from exl2flow.core.store.source import DIGESTS_FILE, SourceFingerprint, provenance_file
from exl2flow.core.store.stage import Stage
from exl2flow.core.store.store import DAMAGED, StageFolder, WorkDir, path_aside, with_inputs

log = logging.getLogger(__name__)

REMOVED = ".removed-"  # in the name of what is being deleted; the time follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that can be removed: a folder, or the tensors in a stage folder.

    path: below the work root; size: bytes of its files.
    """

    path: Path
    why: str
    size: int
    is_tensors: bool = False


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The stages of one work directory, by fingerprint, and folders without a usable manifest.

    last: names of the stages that end a conversion.
    """

    path: Path
    last: Collection[str]
    stages: dict[str, StageFolder] = field(default_factory=dict)
    unusable: list[Path] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, last: Collection[str]) -> "_Work":
        work = cls(path=path, last=last)
        for folder in sorted(path.glob("*/*")):
            if DAMAGED in folder.name or REMOVED in folder.name:
                work.aside.append(folder)
            elif folder.is_dir() and folder.parent.name not in ("prefect", "locks"):
                stage = StageFolder.load(folder)
                if stage is None:
                    work.unusable.append(folder)
                else:
                    work.stages[stage.manifest.fingerprint] = stage
        return work

    def with_inputs(self, fingerprints: Iterable[str]) -> set[str]:
        """Return the fingerprints of these stages and of all stages they depend on."""
        return with_inputs(fingerprints, self.stages)

    def finished(self) -> Iterator[tuple[str, str, float]]:
        """Yield (output folder, fingerprint of the last stage, time) of finished conversions."""
        for fingerprint, folder in self.stages.items():
            output = self.stages.get(folder.manifest.inputs.get(OUTPUT, ""))
            if folder.manifest.stage not in self.last or output is None:
                continue
            statuses = {self.stages[f].manifest.status for f in self.with_inputs([fingerprint])}
            if "partial" not in statuses:  # none was lost and is being made again
                time = max(folder.saved_at, output.saved_at)
                yield str(output.manifest.options.get("out")), fingerprint, time

    @cached_property
    def unfinished(self) -> set[str]:
        """The stages of unfinished conversions, with all they depend on."""
        done = self.with_inputs(fingerprint for _, fingerprint, _ in self.finished())
        return self.with_inputs(self.stages.keys() - done)


@dataclass(frozen=True, kw_only=True)
class _Root:
    """A work root and what it needs; stages: of every kind of run."""

    path: Path
    stages: Sequence[Stage[Any]]
    keep_latest: int
    partial: bool

    @cached_property
    def works(self) -> list[_Work]:
        names = (path for path in self.path.iterdir() if path.is_dir() and path.name != "sources")
        read = {name for stage in self.stages for name in stage.inputs}
        last = {stage.name for stage in self.stages} - read
        return [_Work.read(path, last) for path in sorted(names) if (path / "lock").is_file()]

    @cached_property
    def finished(self) -> dict[Path, set[str]]:
        """Work directory → stages of the newest finished conversions for each output."""
        by_output = defaultdict(list)
        for work in self.works:
            for out, fingerprint, time in work.finished():
                by_output[out].append((time, work, fingerprint))
        kept: dict[Path, set[str]] = {work.path: set() for work in self.works}
        for runs in by_output.values():
            newest = sorted(runs, key=lambda run: run[0], reverse=True)[: self.keep_latest]
            for _, work, fingerprint in newest:
                kept[work.path] |= work.with_inputs([fingerprint])
        return kept

    def needed(self, work: _Work) -> set[str]:
        """Return the fingerprints of the stages to keep."""
        return self.finished[work.path] | (set() if self.partial else work.unfinished)

    def items(self) -> Iterator[Item]:
        """Yield everything that can be removed."""
        for work in self.works:
            yield from self._stages(work)
            yield from self._tensors(work)
        yield from self._sources()

    def _stages(self, work: _Work) -> Iterator[Item]:
        needed = self.needed(work)
        for path in work.aside:
            why = "set aside: damaged, or of another version" if DAMAGED in path.name else "removed"
            yield _item(path, why)
        for path in work.unusable if self.partial else ():
            yield _item(path, "its manifest is damaged")
        for fingerprint, folder in work.stages.items():
            if fingerprint in needed:
                continue
            why = "replaced: its output was made anew since then"
            if fingerprint in work.unfinished:
                why = f"not finished: {folder.manifest.cursor} of {folder.manifest.total}"
            yield _item(folder.path, why)

    def _tensors(self, work: _Work) -> Iterator[Item]:
        """Yield tensors that are in complete outputs and that no unfinished conversion reads."""
        removable = {stage.name for stage in self.stages if stage.removable}
        kept = self.finished[work.path] - (set() if self.partial else work.unfinished)
        outputs = [f for f in kept if work.stages[f].manifest.stage == OUTPUT]
        lost = [f for f in outputs if not work.stages[f].is_complete()]
        for fingerprint in sorted(kept - work.with_inputs(lost)):
            folder = work.stages[fingerprint]
            size = sum(path.stat().st_size for path in folder.tensor_files())
            if folder.manifest.stage in removable and size:
                why = "its tensors are in the output, which is complete"
                yield Item(path=folder.path, why=why, size=size, is_tensors=True)

    def _sources(self) -> Iterator[Item]:
        """Yield fetched models that none of the remaining conversions needs."""
        used = {work.path.name for work in self.works if self.needed(work)}
        known = {work.path.name for work in self.works if work.stages}
        named = {
            work.stages[fingerprint].manifest.options.get("source")
            for work in self.works
            for fingerprint in self.needed(work)
        }
        for folder in sorted(self.path.glob("sources/*/*")):
            if not folder.is_dir() or str(folder.resolve()) in named:
                continue
            if REMOVED in folder.name:
                yield _item(folder, "removed")
            elif not provenance_file(folder).exists():
                if self.partial:
                    yield _item(folder, "its download is not finished")
            elif (name := self._work_name(folder)) is not None and name not in used:
                if name in known:
                    yield _item(folder, "no finished conversion needs it")
                elif self.partial:
                    yield _item(folder, "fetched, never converted")

    def _work_name(self, source: Path) -> str | None:
        """Return the name of a source's work directory; None if it cannot be read."""
        try:
            fingerprint = SourceFingerprint.of(source, memory=self.path / DIGESTS_FILE)
        except SourceModelError:
            return None
        return WorkDir.of(self.path, fingerprint).root.name


def unneeded(
    root: Path, stages: Sequence[Stage[Any]], *, keep_latest: int = 1, partial: bool = False
) -> list[Item]:
    """Return what no finished conversion needs.

    Args:
        root: the work root.
        stages: of every kind of run.
        keep_latest: finished conversions to keep for each output folder.
        partial: whether to include unfinished conversions.

    Raises:
        ConfigError: the folder is not a work root.
        ReadFailed: a manifest cannot be read.
    """
    if not (root / DIGESTS_FILE).is_file() and not (root / "sources").is_dir():
        raise ConfigError(
            f"`{root}` is not a work root; give the folder of checkpoints: `--work-root` of the "
            "conversion, or `.exl2flow` beside its output"
        )
    path = root.resolve()
    known = _Root(path=path, stages=stages, keep_latest=keep_latest, partial=partial)
    return list(known.items())


def clean(
    root: Path,
    stages: Sequence[Stage[Any]],
    *,
    keep_latest: int = 1,
    partial: bool = False,
    skip_busy: bool = False,
) -> list[Item]:
    """Remove what no finished conversion needs, and return it.

    Args:
        root, stages, keep_latest, partial: see `unneeded`.
        skip_busy: whether to skip a work directory that is in use instead of refusing.

    Raises:
        ConfigError: the folder is not a work root.
        WorkDirBusy: a run is using it.
        WriteFailed: something cannot be removed.
    """
    root = root.resolve()
    try:
        with ExitStack() as locks:
            busy = []
            for path in sorted(path.parent for path in root.glob("*/lock")):
                try:
                    locks.enter_context(WorkDir(path).lock())
                except WorkDirBusy:
                    if not skip_busy:
                        raise
                    busy.append(path)
            removable = unneeded(root, stages, keep_latest=keep_latest, partial=partial)
            items = [item for item in removable if not any(map(item.path.is_relative_to, busy))]
            moved = [_move(item) for item in items]
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if path.parent.parent.name == "sources" and not any(path.parent.iterdir()):
                path.parent.rmdir()
    except OSError as error:
        raise WriteFailed(
            f"cannot remove `{error.filename}`: {error.strerror}; fix the permissions and repeat"
        ) from error
    return items


def clean_after(config: RunOptions, stages: Sequence[Stage[Any]]) -> None:
    """Clean the work root after a run if the options say so; skip directories in use."""
    if not config.clean_after:
        return
    try:
        items = clean(config.work_dir_root, stages, skip_busy=True)
    except StoreError as error:  # the run itself succeeded
        log.warning("not cleaned: %s", error)
        return
    size = sum(item.size for item in items)
    log.info("cleaned=%s items=%d size=%.2fGB", config.work_dir_root, len(items), size / 1e9)


def _move(item: Item) -> Path:
    """Rename a folder, or move the tensors out of a stage folder; return the new place."""
    path = item.path
    if REMOVED in path.name:
        return path
    target = path_aside(path, REMOVED)
    if item.is_tensors:
        target.mkdir()
        folder = StageFolder.load(path)
        assert folder is not None  # it was read under the same lock
        folder.clear(target)
    else:
        provenance_file(path).unlink(missing_ok=True)
        path.rename(target)
    return target


def _item(path: Path, why: str) -> Item:
    files = path.rglob("*") if path.is_dir() else [path]
    sizes = (file.lstat().st_size for file in files if not file.is_dir())
    return Item(path=path, why=why, size=sum(sizes))
