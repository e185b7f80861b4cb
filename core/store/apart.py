"""A share of a stage's work on another host, which sees the same files and tells what it made."""

import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.runtime.progress import silent
from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.core.store.crew import Errand, Made
from exl2flow.core.store.files import FileRecord, read_json, write_json
from exl2flow.core.store.manifest import StageManifest
from exl2flow.core.store.stage import StageRun
from exl2flow.core.store.store import StageFolder

CPU_KIND = "a CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartShare:
    """Which share, and what has to be the same where it is made.

    rank, count: of the share among all; kind: name of the devices; probe: a file in the stage's
    folder, and what it holds.
    """

    rank: int
    count: int
    kind: str
    probe: tuple[Path, str]

    @property
    def _told(self) -> Path:
        """The file beside the probe in which the worker tells what it made."""
        path, _ = self.probe
        return path.with_name(f"{path.name}-{self.rank}.json")

    def tell(self, made: Made) -> None:
        """Tell what was made; states of tasks do not carry it from each cluster."""
        write_json(self._told, asdict(made))

    def made(self) -> Made:
        """Return what its worker told."""
        told = read_json(self._told)
        return Made(files=[tuple(file) for file in told["files"]], notes=told["notes"])

    def check(self, device: str) -> None:
        """Check that this host can make it.

        Raises:
            ConfigError: it does not see the work root, or has a device of another kind.
        """
        path, content = self.probe
        host = socket.gethostname()
        if not path.is_file() or path.read_text() != content:
            raise ConfigError(
                f"`{host}` does not see `{path.parent}` as it is; let all workers have the same "
                "work root, and give it with `--work-root`"
            )
        if (kind := kind_of(device)) != self.kind:
            raise ConfigError(
                f"`{host}` has {kind}, and this run {self.kind}; results of two kinds differ, use "
                "workers with one kind"
            )


def kind_of(device: str) -> str:
    """Return the name of a device's kind."""
    return CPU_KIND if device == "cpu" else f"a {torch.cuda.get_device_name(device)}"


class ApartFolder(StageFolder):
    """A stage's folder on another host, which collects what it commits."""

    def __init__(self, path: Path, manifest: StageManifest) -> None:
        super().__init__(path, manifest)
        self.made = Made()

    def commit(
        self, name: str, sha256: str, *, cursor: int | None = None, counts: bool = False
    ) -> None:
        """See `StageFolder`."""
        self.manifest.files[name] = FileRecord.of(self.path / name, sha256=sha256)
        self.made.files.append((name, sha256, counts))

    def note(self, text: str) -> None:
        """See `StageFolder`."""
        self.made.notes.append(text)

    def states_are_due(self) -> bool:
        """Save none: they would be those of all shares."""
        return False

    def remove(self, names: Iterable[str]) -> None:
        """Leave the files."""

    def save(self) -> None:
        """Leave the manifest."""


def work_apart(errand: Errand, share: ApartShare, device: str) -> None:
    """Make a share on a device of this host, and tell what was made; see `ApartShare.made`.

    Raises:
        Exl2FlowError: it cannot be made here.
    """
    share.check(device)
    folder = ApartFolder(errand.path, errand.manifest)
    run = StageRun(
        config=errand.config,
        folder=folder,
        inputs=errand.inputs,
        device=device,
        progress=silent,
        stop=StopRequest(),
        ranks=WorkRanks(share.rank, share.count),
        keeps_states=errand.keeps_states,
    )
    errand.run(run)
    share.tell(folder.made)
