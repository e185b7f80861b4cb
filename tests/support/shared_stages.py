"""Toy stages whose work ranks share; followers import them by name."""

import logging

import torch

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.files import digest, write_text
from exl2flow.core.store.stage import StageRun

log = logging.getLogger(__name__)


def shared(run: StageRun[ConversionConfig]) -> None:
    """Write a file per rank; rank 1 runs out of memory unless states are in main memory."""
    run.folder.manifest.total = run.ranks.count
    if run.ranks.rank == 1 and run.keeps_states:
        raise torch.OutOfMemoryError("full")
    name = f"part-{run.ranks.rank}"
    write_text(run.folder.path / name, name)
    run.folder.note(f"of {name}")
    log.warning("a warning of %s", name)
    run.folder.commit(name, digest(run.folder.path / name), counts=True)
    run.tick(run.folder.manifest.cursor, run.ranks.count, name)
    run.settle({f"part-{rank}" for rank in range(run.ranks.count)})
