"""A stage's folder of a process that does not write its manifest, and tells the one that does."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from exl2flow.core.runtime.progress import Tick
from exl2flow.core.store.files import FileRecord
from exl2flow.core.store.manifest import StageManifest
from exl2flow.core.store.store import StageFolder


class ToldFolder(StageFolder):
    """A stage's folder which tells what it commits; see `record`.

    tell: takes the kind of what is told, and its content.
    """

    def __init__(
        self, path: Path, manifest: StageManifest, tell: Callable[[str, Any], object]
    ) -> None:
        super().__init__(path, manifest)
        self._tell, self._has_news = tell, False

    def commit(
        self, name: str, sha256: str, *, cursor: int | None = None, counts: bool = False
    ) -> None:
        """See `StageFolder`."""
        self.manifest.files[name] = FileRecord.of(self.path / name, sha256=sha256)
        self._tell("commit", (name, sha256, counts))
        self._has_news = self._has_news or counts

    def tick(self, tick: Tick) -> None:
        """Tell of progress, which rank 0 makes itself but where this rank commits."""
        if self._has_news:
            self._tell("tick", tick)
        self._has_news = False

    def note(self, text: str) -> None:
        """See `StageFolder`."""
        self._tell("note", text)

    def states_are_due(self) -> bool:
        """Save none: they would be those of all ranks."""
        return False

    def remove(self, names: Iterable[str]) -> None:
        """Leave the files to the process that writes the manifest."""

    def save(self) -> None:
        """Leave the manifest to that process."""


def record(folder: StageFolder, kind: str, content: Any) -> bool:
    """Record what a `ToldFolder` told, and return whether it was a commit or a note."""
    if kind == "commit":
        name, sha256, counts = content
        folder.commit(name, sha256, counts=counts)
    elif kind == "note":
        folder.note(content)
    else:
        return False
    return True
