"""The identity of a source: a folder or a model on the Hub, its origin, its digests.

Digests cover all files that determine a conversion; they are remembered between runs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2flow.core.errors import NO_JSON, SourceModelError, WriteFailed
from exl2flow.core.store.files import FileRecord, digest, digest_of, exclusive, write_json
from exl2flow.core.store.manifest import CHECKSUM
from exl2flow.core.store.model_files import (
    TEKKEN_FILE,
    has_only_tekken,
    is_second_copy,
    second_copies,
    weight_files,
)
from exl2flow.core.store.outline import known_digests
from exl2flow.core.store.shard_index import choosing_index

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
WANTED = "a Hugging Face model, or its name on the Hub as `org/name`"  # as a source

MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
)
DIGESTS_FILE = "digests.json"  # in a work root: remembered digests
READERS = 4  # files that are hashed at a time: a core hashes 2 GB/s
ATTEMPTS = 3  # to read a file that changes meanwhile
PROVENANCE = ("repo", "revision", "commit", "license", "license_name", "license_link", "gated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFingerprint:
    """`slug` is a file name; `fingerprint` covers weights, config and tokenizer.

    files: what it covers, as name → sha256.
    """

    slug: str
    fingerprint: str
    files: Mapping[str, str]

    @classmethod
    def of(cls, source: Path, *, memory: Path) -> "SourceFingerprint":
        """Digest the model's files; unchanged files are not read again.

        Args:
            source: the model's folder.
            memory: JSON file of earlier digests by path; created when missing.

        Raises:
            SourceModelError: the folder or its weights cannot be read, or a file keeps changing.
        """
        source = source.resolve()
        with _readable(source):
            paths = weight_files(source) + choosing_index(source)
            paths += [source / name for name in MODEL_FILES if (source / name).is_file()]
            paths += [source / TEKKEN_FILE] * has_only_tekken(source)
            files = _by_name(digests(paths, memory))
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.").lower() or "model"
        files = _begun_with(files, memory) or files
        return cls(slug=slug, fingerprint=digest_of(files), files=files)

    def is_named(self, fingerprint: object, source: Path, *, memory: Path) -> bool:
        """Return whether a record's fingerprint is this one, or what it was with second copies."""
        if fingerprint == self.fingerprint:
            return True
        with _readable(source):
            copies = digests(second_copies(source.resolve()), memory)
        return fingerprint == digest_of({**self.files, **_by_name(copies)})


@contextmanager
def _readable(source: Path) -> Iterator[None]:
    """Name the file of a model that cannot be read."""
    try:
        yield
    except OSError as error:
        raise SourceModelError(
            f"cannot read `{error.filename or source}`: {error.strerror}; "
            "check the folder and its permissions"
        ) from error


def _by_name(found: Mapping[Path, str]) -> dict[str, str]:
    return {path.name: sha256 for path, sha256 in found.items()}


def _begun_with(files: Mapping[str, str], memory: Path) -> dict[str, str] | None:
    """Return a source's files together with second copies if a work root knows it by these.

    They counted in older versions, whose stages go on. Their digests are remembered, so it does not
    matter whether the copies are still there, or where they were.
    """
    copies: dict[Path, dict[str, str]] = {}
    for path, record in _load(memory).items():
        if is_second_copy(Path(path).name):
            copies.setdefault(Path(path).parent, {})[Path(path).name] = str(record.sha256)
    for beside in copies.values():
        known = {**files, **beside}
        if any(memory.parent.glob(f"*{end_of_name(digest_of(known))}")):
            return known
    return None


def end_of_name(fingerprint: str) -> str:
    """Return how the name of a source's folder in a work root ends."""
    return f"-{fingerprint[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model on the Hub: `org/name`, and a branch, tag or commit."""

    repo: str
    revision: str | None = None

    @classmethod
    def of(cls, source: Path | str) -> "HubModel | None":
        """Parse `org/name` or `org/name@revision`; None for anything else."""
        match = HUB_ID.fullmatch(str(source))
        return match and cls(repo=match["repo"], revision=match["revision"])

    @property
    def name(self) -> str:
        """The part after the organization."""
        return self.repo.rpartition("/")[2]

    def is_begun(self, work_root: Path) -> bool:
        """Return whether a work root holds a model of this name, fetched at least in part."""
        return any(work_root.glob(f"sources/*/{self.name}"))


def hub_model(source: Path, work_root: Path) -> HubModel | None:
    """Return the model on the Hub that a source names, None for a folder.

    An existing folder takes precedence over the Hub. If there is a folder `org`, then `org/name` is
    considered a mistyped path, unless the model's fetch has begun: the folder may have been created
    for the output or the work root.

    Raises:
        SourceModelError: the source is a mistyped path.
    """
    wanted = HubModel.of(source)
    if wanted is None or source.exists():
        return None
    is_path = wanted.revision is None and source.parent.is_dir()
    if is_path and not wanted.is_begun(work_root):
        raise SourceModelError(
            f"no folder `{source}`, but `{source.parent}` is one; correct the path, or "
            f"write `{source}@main` for a model on the Hub"
        )
    return wanted


def provenance_file(source: Path) -> Path:
    """Return the file that records the repository and commit of a fetched folder."""
    return source.with_name(f"{source.name}.source.json")


def provenance(source: Path) -> dict[str, Any] | None:
    """Return what was recorded when a folder was fetched from the Hub, None for others.

    Keys: repo, revision, commit, license, license_name, license_link, gated.
    """
    try:
        record = json.loads(provenance_file(source.resolve()).read_bytes())
        return {key: record[key] for key in PROVENANCE}
    except (*NO_JSON, KeyError, TypeError):
        return None


def digests(paths: list[Path], memory: Path) -> dict[Path, str]:
    """Return path → sha256, reading only files that changed or are new, several at a time.

    Those of an outline are what the Hub says of the real files.

    Raises:
        SourceModelError: a file keeps changing while it is read.
    """
    known, remembered = known_digests(paths), _load(memory)
    paths_here = [path for path in paths if path not in known]
    stale = [path for path in paths_here if not _holds(remembered.get(str(path)), path)]
    with ThreadPoolExecutor(READERS, thread_name_prefix="exl2flow-digest") as threads:
        for path, record in zip(stale, threads.map(_record, stale), strict=True):
            remembered[str(path)] = record
            _remember(memory, path, record)
    return {path: known.get(path) or str(remembered[str(path)].sha256) for path in paths}


def _holds(record: FileRecord | None, path: Path) -> bool:
    return record is not None and FileRecord.of(path, sha256=record.sha256) == record


def _record(path: Path) -> FileRecord:
    """Digest a file, again if it changes meanwhile."""
    for _ in range(ATTEMPTS):
        before = FileRecord.of(path, sha256=None)
        sha256 = digest(path)
        if FileRecord.of(path, sha256=None) == before:
            return before.model_copy(update={"sha256": sha256})
    raise SourceModelError(
        f"`{path}` changes while it is read; wait until it is downloaded or copied, then repeat "
        "the command"
    )


def _load(memory: Path) -> dict[str, FileRecord]:
    """Return the remembered digests; none if the memory is damaged, which costs time only."""
    try:
        entries = json.loads(memory.read_bytes())
        if entries.pop(CHECKSUM, None) != digest_of(entries):
            return {}
        return {name: FileRecord.model_validate(entry) for name, entry in entries.items()}
    except (*NO_JSON, AttributeError, TypeError):
        return {}


def _remember(memory: Path, path: Path, record: FileRecord) -> None:
    """Add a digest to what this and other processes remember."""
    try:
        with exclusive(memory):
            records = {**_load(memory), str(path): record}
            entries = {name: known.model_dump() for name, known in records.items()}
            write_json(memory, {**entries, CHECKSUM: digest_of(entries)})
    except WriteFailed:
        return  # the disk may be full or read-only: pre-flight reports that in its own words
