"""The work directory: a folder with a manifest per stage and fingerprint, each with one owner.

`<work root>/<model>-<source fingerprint>/<stage>/<fingerprint>/manifest.json`
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from exl2flow.core.errors import CorruptCheckpoint, StoreError, WorkDirBusy, WriteFailed
from exl2flow.core.store.files import (
    TEMPORARY_SUFFIX,
    FileRecord,
    digest,
    digest_of,
    make_folder,
    read_json,
    read_tensors,
    sync,
    write_json,
    write_tensors,
)
from exl2flow.core.store.manifest import SavedStates, StageManifest
from exl2flow.core.store.manifest import versions as versions
from exl2flow.core.store.source import SourceFingerprint, end_of_name

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
DAMAGED = ".damaged-"  # in the name of a folder set aside; the time follows
STATES_INTERVAL_SECONDS = 20.0  # hidden states are large: a resume replays what came after them
STATES_SHARE = 0.1  # of the time may be spent on saving them, if that takes longer than usual
STATES_LONGEST = 15  # intervals between saves at most
TOLD = 60.0  # seconds until what other processes have told is recorded


class StageRef(BaseModel):
    """Reference to a stage's result, exchanged by stages and tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    fingerprint: str
    path: str


class StageFolder:
    """One stage's folder: commits files to its manifest and checks whether they are intact."""

    def __init__(self, path: Path, manifest: StageManifest) -> None:
        self.path = path
        self.manifest = manifest
        self.check: Callable[[], None] = lambda: None  # may refuse what is about to be recorded
        self._lock = threading.RLock()  # a background thread stores results
        self._committed = threading.Condition(self._lock)
        self._states_time = time.monotonic()
        self._states_cost = 0.0
        self._opened_at = time.monotonic()
        self._seconds_before = manifest.seconds

    @classmethod
    def load(cls, path: Path, fingerprint: str | None = None) -> Self | None:
        """Return the folder of a result; None without an intact manifest with this fingerprint.

        Any fingerprint will do if none is given.

        Raises:
            ReadFailed: the manifest is there but cannot be read.
        """
        try:
            manifest = StageManifest.unsealed(read_json(path / MANIFEST))
        except (CorruptCheckpoint, ValidationError):
            return None
        return cls(path, manifest) if fingerprint in (None, manifest.fingerprint) else None

    @property
    def saved_at(self) -> float:
        """When the manifest was last written, in seconds since the epoch."""
        return (self.path / MANIFEST).stat().st_mtime

    def valid(self, name: str) -> bool:
        """Return whether a committed file is unchanged."""
        record = self.manifest.files.get(name)
        return record is not None and record.matches(self.path / name)

    def is_complete(self) -> bool:
        """Return whether the stage is finished and all its files are unchanged."""
        return self.manifest.status == "complete" and all(map(self.valid, self.manifest.files))

    def has_results(self) -> bool:
        """Return whether the folder holds finished work: an unchanged file, or states."""
        saved = self.manifest.states
        inside = [name for name in self.manifest.files if not Path(name).is_absolute()]
        return any(map(self.valid, inside)) or (
            saved is not None and saved.record.matches(self.path / saved.file)
        )

    def commit(
        self, name: str, sha256: str, *, cursor: int | None = None, counts: bool = False
    ) -> None:
        """Record a file that has been written, and the progress of the stage.

        Args:
            name: of the file.
            sha256: of its content.
            cursor: how much of the stage is done; None: as before, or one more if it `counts`.
            counts: whether the file is one of the stage's steps.
        """
        self.check()
        with self._committed:
            self.manifest.files[name] = FileRecord.of(self.path / name, sha256=sha256)
            self.manifest.cursor = self.manifest.cursor + counts if cursor is None else cursor
            self.save()
            self._committed.notify_all()

    def wait_for(self, names: AbstractSet[str]) -> None:
        """Wait until files are recorded, which other processes have told.

        Raises:
            StoreError: they are not, although all has been told.
        """
        with self._committed:
            if not self._committed.wait_for(lambda: names <= self.manifest.files.keys(), TOLD):
                missing = ", ".join(sorted(names - self.manifest.files.keys()))
                raise StoreError(f"`{self.path}` lacks {missing}; repeat the command")

    def remove(self, names: Iterable[str]) -> None:
        """Delete files that no resume needs, whether they are recorded or not.

        The manifest forgets them first, so that it names none that is gone; if that is all that
        happens, the same call deletes them after a resume.
        """
        with self._lock:
            recorded = self.manifest.files.keys() & set(names := list(names))
            for name in recorded:
                del self.manifest.files[name]
            if recorded:
                self.save()
            _delete_for_good([path for name in names if (path := self.path / name).exists()])

    def note(self, text: str) -> None:
        """Add a sentence to the report; it is stored with the next commit."""
        with self._lock:
            if text not in self.manifest.notes:
                self.manifest.notes.append(text)

    def save(self) -> None:
        """Write the manifest."""
        with self._lock:
            self.manifest.seconds = self._seconds_before + time.monotonic() - self._opened_at
            write_json(self.path / MANIFEST, self.manifest.sealed())

    def states_are_due(self) -> bool:
        """Return whether to save states now; if so, a new interval begins.

        The longer saving takes, the longer the interval.
        """
        longest = STATES_LONGEST * STATES_INTERVAL_SECONDS
        pause = min(max(STATES_INTERVAL_SECONDS, self._states_cost / STATES_SHARE), longest)
        now = time.monotonic()
        if now - self._states_time < pause:
            return False
        self._states_time = now
        return True

    def save_states(self, states: torch.Tensor, index: int) -> None:
        """Save the hidden states entering sublayer `index`, which are in main memory."""
        started = time.monotonic()
        saved = self.manifest.states
        name = "states-b.safetensors" if saved and "-a" in saved.file else "states-a.safetensors"
        sha256 = write_tensors(self.path / name, {"states": states})
        record = FileRecord.of(self.path / name, sha256=sha256)
        self.check()
        with self._lock:
            self.manifest.states = SavedStates(file=name, index=index, record=record)
            self.save()
        self._states_time = time.monotonic()
        self._states_cost = self._states_time - started

    def load_states(self) -> tuple[int, torch.Tensor] | None:
        """Return (sublayer index, states) of the last saved states if they are intact."""
        saved = self.manifest.states
        if saved is None or not saved.record.matches(self.path / saved.file):
            return None
        if saved.record.sha256 not in (None, digest(self.path / saved.file)):
            log.warning("the saved states in `%s` are damaged; the walk restarts", self.path)
            return None
        return saved.index, read_tensors(self.path / saved.file)["states"]

    def tensor_files(self) -> list[Path]:
        """Return the safetensors files in the folder."""
        return sorted(self.path.rglob("*.safetensors"))

    def clear(self, aside: Path) -> None:
        """Move the tensors of a complete stage to a folder aside; what is small stays."""
        with self._lock:
            rest = {n: r for n, r in self.manifest.files.items() if not n.endswith(".safetensors")}
            self.manifest.files, self.manifest.status = rest, "cleared"
            self.save()
            for number, path in enumerate(self.tensor_files()):
                path.rename(aside / str(number))

    def complete(self) -> None:
        """Mark the stage complete and delete what only a resume needs."""
        self.check()
        _delete_for_good(list(self.path.glob("states-?.safetensors")))
        self.manifest.status = "complete"
        self.manifest.states = None
        self.save()


def _set_aside(path: Path, stage: str) -> None:
    """Rename a folder whose manifest is damaged or unknown; `exl2flow clean` deletes it.

    Raises:
        WriteFailed: it cannot be renamed.
    """
    files = (p for p in path.rglob("*") if p.is_file() and not p.name.endswith(TEMPORARY_SUFFIX))
    if not path.exists() or (path.is_dir() and not any(files)):
        return
    target = path_aside(path, DAMAGED)
    try:
        path.rename(target)
    except OSError as error:
        raise WriteFailed(f"cannot set `{path}` aside: {error.strerror}; move it away") from error
    log.warning(
        "stage `%s` begins anew: its manifest is damaged or from another version; the old folder "
        "is kept as `%s`, `exl2flow clean` removes it",
        stage,
        target,
    )


def path_aside(path: Path, mark: str) -> Path:
    """Return a free path beside another, with a mark and the time in its name."""
    target = path.with_name(f"{path.name}{mark}{time.strftime('%Y%m%dT%H%M%S')}")
    while target.exists():  # made within this second
        target = target.with_name(f"{target.name}-")
    return target


def _refuse_other_device(folder: StageFolder, device: str) -> None:
    """Refuse to mix the results of two device classes.

    Raises:
        StoreError: the folder holds some of another one.
    """
    manifest = folder.manifest
    if not folder.has_results():
        return
    is_lost = manifest.device == "cuda" and device == "cpu"
    way_out = (
        "make the GPU visible again" if is_lost else f"continue with `--device {manifest.device}`"
    )
    raise StoreError(
        f"stage `{manifest.stage}` was begun on {manifest.device} ({manifest.cursor} of "
        f"{manifest.total} done) and this run is on {device}: {way_out}, or begin the stage anew "
        f"with `--restart` or by deleting `{folder.path}`"
    )


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteFailed(
            f"cannot delete `{path}`: {error.strerror}; move it away and repeat the command"
        ) from error


def _delete_for_good(paths: Sequence[Path]) -> None:
    """Delete files; a power cut does not bring them back, when nobody would delete them."""
    for path in paths:
        _delete(path)
    for folder in {path.parent for path in paths}:
        if folder.is_dir():
            sync(folder)


def with_inputs(fingerprints: Iterable[str], stages: Mapping[str, StageFolder]) -> set[str]:
    """Return the fingerprints of these stages and of all stages they depend on, if they exist."""
    found: set[str] = set()
    waiting = list(fingerprints)
    while waiting:
        fingerprint = waiting.pop()
        if fingerprint in stages and fingerprint not in found:
            found.add(fingerprint)
            waiting += stages[fingerprint].manifest.inputs.values()
    return found


class WorkDir:
    """The stages of one source model."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, work_root: Path, source: SourceFingerprint) -> Self:
        """Return a source's folder in a work root; a source that was renamed keeps its folder."""
        end = end_of_name(source.fingerprint)
        path = work_root / f"{source.slug}{end}"
        earlier = [] if path.is_dir() else sorted(work_root.glob(f"*{end}"))
        return cls(earlier[0] if earlier else path)

    def ref(self, stage: str, fingerprint: str) -> StageRef:
        """Return the reference of a stage result, whether it exists or not."""
        return StageRef(stage=stage, fingerprint=fingerprint, path=f"{stage}/{fingerprint[:16]}")

    def path(self, ref: StageRef) -> Path:
        """Return the folder of a stage result."""
        return self.root / ref.path

    def is_complete(self, ref: StageRef) -> bool:
        """Return whether a stage result is complete and unaltered."""
        folder = StageFolder.load(self.path(ref), ref.fingerprint)
        return folder is not None and folder.is_complete()

    def is_cleared(self, ref: StageRef) -> bool:
        """Return whether a stage was complete before `exl2flow clean` removed its tensors."""
        folder = StageFolder.load(self.path(ref), ref.fingerprint)
        return folder is not None and folder.manifest.status == "cleared"

    def open(
        self,
        ref: StageRef,
        *,
        schema: int,
        inputs: Mapping[str, str],
        options: Mapping[str, object],
        device: str,
    ) -> StageFolder:
        """Open a stage folder for work: resume a partial one of this device class, or begin.

        Nothing that was finished is deleted: what cannot be resumed is set aside or refused.

        Raises:
            StoreError: the stage was begun on another device class.
            ReadFailed: the manifest, or a file that it lists, cannot be read.
        """
        path = self.path(ref)
        folder = StageFolder.load(path, ref.fingerprint)
        if folder is None:
            _set_aside(path, ref.stage)
        elif folder.manifest.status == "cleared":
            folder = None
        elif folder.manifest.device != device:
            _refuse_other_device(folder, device)
            folder = None
        if folder is None:
            manifest = StageManifest(
                stage=ref.stage,
                schema_version=schema,
                fingerprint=ref.fingerprint,
                inputs=dict(inputs),
                options=dict(options),
                device=device,
            )
            folder = StageFolder(path, manifest)
        for leftover in path.rglob(f".*{TEMPORARY_SUFFIX}"):
            _delete(leftover)
        folder.manifest.status = "partial"
        folder.manifest.versions = versions()
        folder.save()
        return folder

    def lock(self) -> AbstractContextManager[None]:
        """Lock the whole work directory; the kernel releases it whenever the process ends.

        Raises:
            WorkDirBusy: another process holds it or one of its stages.
        """
        return self._held(self.root / "lock", fcntl.LOCK_EX)

    @contextmanager
    def lock_stage(self, ref: StageRef, out: Path | None) -> Iterator[None]:
        """Lock a stage folder and an output folder; other stages may run at the same time.

        Args:
            ref: the stage.
            out: the output; None if the caller has locked it, or the stage's run writes none.

        Raises:
            WorkDirBusy: another process holds one of them or the whole directory.
        """
        with (
            self._held(self.root / "lock", fcntl.LOCK_SH),
            self._held(self.root / "locks" / ref.path.replace("/", "-"), fcntl.LOCK_EX),
            nullcontext() if out is None else self.lock_output(out),
        ):
            yield

    @contextmanager
    def lock_output(self, out: Path) -> Iterator[None]:
        """Lock an output folder against runs of every work root; create it for that time.

        Raises:
            WorkDirBusy: another process writes into it.
        """
        out = out.resolve()
        path = self.root / "locks" / f"out-{digest_of(str(out))[:16]}"  # also holds the process id
        with self._held(path, fcntl.LOCK_EX, out), _locked_folder(out):
            yield

    @contextmanager
    def _held(self, path: Path, mode: int, out: Path | None = None) -> Iterator[None]:
        """Hold a lock file, that of an output if given; an exclusive one has the process id."""
        make_folder(path.parent)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _busy(f"process {self._owner(path)}", self.root, out) from None
            if mode == fcntl.LOCK_EX:
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(handle)

    def _owner(self, path: Path) -> str:
        """Return the process id in a lock file that is held; one that is shared has none."""
        for held in (path, *sorted((self.root / "locks").glob("*"))):
            with held.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read(32).decode() or "unknown"
        return "unknown"


def _busy(owner: str, root: Path, out: Path | None = None) -> WorkDirBusy:
    """Return the error for a work root, or an output if given, in which another process works."""
    where, option = (root, "--work-root") if out is None else (out, "--out")
    return WorkDirBusy(
        f"{owner} is working in `{where}`; wait for it, stop it, or choose another `{option}`"
    )


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder itself; a folder that is created and stays empty is removed."""
    is_new = not folder.exists()
    handle = _lock_folder(folder)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(handle)


def _lock_folder(folder: Path) -> int:
    """Return a handle that locks a folder, which is created if it is missing."""
    while True:
        make_folder(folder)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise _busy("another process", folder, folder) from None
        except OSError:  # a file system that locks no folders
            return handle
        if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
            return handle
        os.close(handle)  # its owner removed it meanwhile
