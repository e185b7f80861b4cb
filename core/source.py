"""Which model a folder holds: digests of all files that determine a conversion, remembered."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from exl2flow.core.errors import SourceModelError, WriteFailed
from exl2flow.core.files import FileRecord, digest, digest_of, write_json

MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFingerprint:
    """`slug` is a file name; `fingerprint` covers weights, config and tokenizer."""

    slug: str
    fingerprint: str

    @classmethod
    def of(cls, source: Path, *, memory: Path) -> "SourceFingerprint":
        """Digest the model's files, reusing digests remembered for unchanged files.

        Args:
            source: the model's folder.
            memory: JSON file of earlier digests, by path; made when missing.

        Raises:
            SourceModelError: the folder or its weights cannot be read.
        """
        source = source.expanduser().resolve()
        try:
            paths = sorted(source.glob("*.safetensors"))
            paths += [source / name for name in MODEL_FILES if (source / name).is_file()]
            digests = _digests(paths, memory)
        except OSError as error:
            raise SourceModelError(
                f"cannot read `{error.filename or source}`: {error.strerror}; "
                "check the folder and its permissions"
            ) from error
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.").lower() or "model"
        return cls(slug=slug, fingerprint=digest_of(digests))


def _digests(paths: list[Path], memory: Path) -> dict[str, str]:
    """Return name → sha256, reading only files that are not remembered."""
    remembered = _load(memory)
    result: dict[str, str] = {}
    for path in paths:
        known = remembered.get(str(path))
        if known is None or FileRecord.of(path, sha256=known.sha256) != known:
            known = FileRecord.of(path, sha256=digest(path))
            remembered[str(path)] = known
            _save(memory, remembered)
        result[path.name] = str(known.sha256)
    return result


def _load(memory: Path) -> dict[str, FileRecord]:
    """Return the remembered digests; an unreadable memory only costs time."""
    try:
        entries = json.loads(memory.read_bytes())
        return {name: FileRecord.model_validate(entry) for name, entry in entries.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _save(memory: Path, remembered: dict[str, FileRecord]) -> None:
    try:
        write_json(memory, {name: entry.model_dump() for name, entry in remembered.items()})
    except WriteFailed:
        return  # the disk may be full or read-only: pre-flight reports that in its own words
