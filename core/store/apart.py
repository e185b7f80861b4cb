"""A share of a stage's work on another host, which sees the same files and tells what it made."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.runtime.progress import silent
from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.core.store.crew import Errand
from exl2flow.core.store.files import read_json, write_json
from exl2flow.core.store.stage import StageRun
from exl2flow.core.store.told import ToldFolder

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

    def tell(self, words: Sequence[tuple[str, Any]]) -> None:
        """Tell what was made; states of tasks do not carry it from each cluster."""
        write_json(self._told, words)

    def told(self) -> list[tuple[str, Any]]:
        """Return what its worker told: kinds and contents, see `told.record`."""
        return [(kind, content) for kind, content in read_json(self._told)]

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


def work_apart(errand: Errand, share: ApartShare, device: str) -> None:
    """Make a share on a device of this host, and tell what was made; see `ApartShare.told`.

    Raises:
        Exl2FlowError: it cannot be made here.
    """
    share.check(device)
    words = list[tuple[str, Any]]()
    folder = ToldFolder(errand.path, errand.manifest, lambda *word: words.append(word))
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
    share.tell(words)
