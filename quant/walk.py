"""Hidden states streamed through one sublayer at a time, with a commit after each.

Measuring and quantizing are the same walk with different work at each stop. Work already committed
is not repeated: its sublayers are only run forward, from the last saved states or from the start.
"""

import logging
import time
from pathlib import Path
from typing import Protocol

import torch

from exl2flow.core.stage import StageRun
from exl2flow.model import Sublayer, SublayerSpec
from exl2flow.quant.source import SourceModel, StatesCheck, device_of, place

log = logging.getLogger(__name__)


class SublayerWork(Protocol):
    """What a walk does at each sublayer."""

    again: range  # rows whose states run a second time, after those of all rows

    def file(self, sublayer: SublayerSpec) -> str:
        """Return the name of the sublayer's result inside the stage folder."""
        ...

    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> str:
        """Do the work, move `states` past the sublayer in place, write `path`, return its sha256.

        States are fp32 (rows, t, hidden), those of `again` last.
        """
        ...

    def replay(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> None:
        """Move `states` past the sublayer in place by committed results."""
        ...

    def describe(self, path: Path) -> str:
        """Return a few words on a finished result for the log."""
        ...


class OverSource:
    """What works share whose states are the source's own, and whose results are JSON."""

    again = range(0)

    def file(self, sublayer: SublayerSpec) -> str:
        """See `SublayerWork`."""
        return f"sublayers/{sublayer.index:04d}.json"

    def replay(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> None:
        """See `SublayerWork`: states of the source need no results."""
        advance(sublayer, states)


def advance(sublayer: Sublayer, states: torch.Tensor) -> None:
    """Run every row through a sublayer, in place."""
    check = StatesCheck(sublayer.spec.name)
    for row in range(len(states)):
        hidden = states[row : row + 1].to(device_of(sublayer))
        output = sublayer(hidden)[0]
        check.add(row, output)
        states[row] = output
    check.finish()


def walk(
    run: StageRun, model: SourceModel, ids: torch.Tensor, work: SublayerWork, *, to_end: bool
) -> torch.Tensor | None:
    """Do the work of all sublayers that lack it.

    Args:
        run: the stage; its manifest receives each result.
        model: the source.
        ids: int64 (rows, t), the calibration rows.
        work: what to do at each sublayer.
        to_end: whether the states after the last sublayer are wanted.

    Returns:
        States fp32 (rows, t, hidden) after the last sublayer when `to_end`, with those of `again`.
    """
    order = model.spec.sublayers
    folder = run.folder
    finished = [folder.valid(work.file(sublayer)) for sublayer in order]
    if all(finished) and not to_end:
        return None
    stop = len(order) if to_end else len(order) - finished[::-1].index(False)
    first_open = finished.index(False) if not all(finished) else len(order)
    saved = folder.load_states()
    if saved is not None and saved[0] <= first_open:
        start, states = saved
    else:
        start, states = 0, model.initial_states(torch.cat([ids, ids[list(work.again)]]))
    states = place(states, model.device)
    run.tick(sum(finished), folder.manifest.total)
    for spec in order[start:stop]:
        begun = time.monotonic()
        path = folder.path / work.file(spec)
        sublayer = model.sublayer(spec)
        if finished[spec.index]:
            work.replay(sublayer, states, path)
        else:
            sha256 = work.compute(sublayer, states, path)
            finished[spec.index] = True
            folder.commit(work.file(spec), sha256, cursor=sum(finished))
            detail = f"{spec.name} {work.describe(path)}"
            log.info("%s elapsed=%.2fs", detail, time.monotonic() - begun)
            run.tick(sum(finished), folder.manifest.total, detail)
        folder.save_states(states, spec.index + 1, force=run.stop.signum is not None)
        run.stop_if_asked()
    return states if to_end else None
