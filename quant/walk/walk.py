"""Hidden states streamed through one sublayer at a time, with a commit after each.

Measuring and quantizing are the same walk with different work at each sublayer. Committed work is
not repeated: those sublayers only run forward, from the last saved states or from the start.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.background import Background, to_host
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.runtime.ranks import ALONE, WorkRanks
from exl2flow.core.store.stage import StageRun
from exl2flow.model import Sublayer, SublayerSpec
from exl2flow.quant.walk.deal import Deal
from exl2flow.quant.walk.source_model import SourceModel, StatesCheck, device_of, row_batches

T = TypeVar("T")
log = logging.getLogger(__name__)

Store = Callable[[], str]

STATE_FILES = 3  # saved states: two in turn, and the one replacing either


class SublayerWork(ABC):
    """Base of the work that a walk does at each sublayer.

    By default the states are the source's own, which need no results, and results are JSON.
    """

    again = range(0)  # rows whose states are walked twice; the copies follow all rows
    here: Sequence[int] | None = None  # places of this rank's states among all of these; None: all

    def file(self, sublayer: SublayerSpec) -> str:
        """Return the name of the sublayer's result inside the stage folder."""
        return f"sublayers/{sublayer.index:04d}.json"

    @abstractmethod
    def compute(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> Store | None:
        """Do the work, advance `states` in place, and return a function that stores the result.

        States are fp32 (rows, t, hidden), those of `again` last. The function runs in another
        thread, writes `path`, and returns the file's sha256. None: another rank stores it.
        """

    def replay(self, sublayer: Sublayer, states: torch.Tensor, path: Path) -> None:
        """Advance `states` in place through the sublayer, using committed results."""
        advance(sublayer, states)

    @abstractmethod
    def describe(self, path: Path) -> str:
        """Describe a finished result in a few words for the log."""


def advance(sublayer: Sublayer, states: torch.Tensor, deal: Deal | None = None) -> None:
    """Run every row through a sublayer, in place.

    Args:
        sublayer: through which.
        states: fp32 (rows, t, hidden).
        deal: whose rows these are; None: they are all there are.
    """
    check = StatesCheck(sublayer.spec.name, 0 if deal is None else deal.own.start)
    for rows in row_batches(sublayer, states, deal.pieces if deal else None):
        look()
        output = sublayer(states[rows].to(device_of(sublayer), non_blocking=True))
        check.add(range(rows.start, rows.stop), output)
        states[rows].copy_(output, non_blocking=True)
    check.finish(states)


def walk(
    run: StageRun[RunOptions],
    model: SourceModel,
    ids: torch.Tensor,
    work: SublayerWork,
    *,
    to_end: bool,
    own: Container[int] | None = None,
) -> torch.Tensor | None:
    """Do the work of all sublayers that lack it.

    Args:
        run: the stage; its manifest receives each result.
        model: the source.
        ids: int64 (rows, t), the calibration rows.
        work: what to do at each sublayer.
        to_end: whether to return the states after the last sublayer.
        own: sublayers that this rank works on, by index; through others states only run. None: all.

    Returns:
        States fp32 (rows, t, hidden) after the last sublayer when `to_end`, with those of `again`.
    """
    return remedied(
        model, lambda model: _walk(run, model, ids, work, to_end=to_end, own=own), run.ranks
    )


def remedied(model: SourceModel, work: Callable[[SourceModel], T], ranks: WorkRanks = ALONE) -> T:
    """Return the result of resumable work with a model.

    If memory runs out, resume it with its states in main memory. Of several ranks all have to
    begin again, which is up to the pipeline.
    """
    try:
        return work(model)
    except torch.OutOfMemoryError:
        if ranks.are_many or not model.keeps_states:
            raise
        log.warning("remedy=out of memory: states move to main memory, the walk restarts")
    torch.cuda.empty_cache()  # now that nothing of the work is left
    return work(replace(model, keeps_states=False))


def _walk(
    run: StageRun[RunOptions],
    model: SourceModel,
    ids: torch.Tensor,
    work: SublayerWork,
    *,
    to_end: bool,
    own: Container[int] | None,
) -> torch.Tensor | None:
    order = model.spec.sublayers
    folder = run.folder
    done = [folder.valid(work.file(sublayer)) for sublayer in order]
    finished = [done[s.index] or (own is not None and s.index not in own) for s in order]
    if all(finished) and not to_end:
        return None
    stop = len(order) if to_end else len(order) - finished[::-1].index(False)
    first_open = finished.index(False) if not all(finished) else len(order)
    saved = folder.load_states()
    if saved is not None and saved[0] <= first_open:
        start = saved[0]
        states = model.placed(saved[1] if work.here is None else saved[1][work.here])
    else:
        start, whole = 0, torch.cat([ids, ids[list(work.again)]])
        states = model.initial_states(whole, work.here)
    folder.manifest.cursor = sum(done)
    run.tick(folder.manifest.cursor, folder.manifest.total)

    def commit(spec: SublayerSpec, begun: float, sha256: str) -> None:
        name = work.file(spec)
        folder.commit(name, sha256, counts=True)
        detail = f"{spec.name} {work.describe(folder.path / name)}"
        log.info("%s elapsed=%.2fs", detail, time.monotonic() - begun)
        run.tick(folder.manifest.cursor, folder.manifest.total, detail)

    with Background(model.device) as results, Background(model.device) as saves:
        begun = time.monotonic()
        for sublayer in model.sublayers(order[start:stop]):
            spec = sublayer.spec
            path = folder.path / work.file(spec)
            states = model.entering(states, spec)
            if finished[spec.index]:
                work.replay(sublayer, states, path)
            else:
                store = work.compute(sublayer, states, path)
                finished[spec.index] = True
                if store is not None:
                    results.store(store, partial(commit, spec, begun))
            needed, after = spec.index + 1 < stop, spec.index + 1
            save_when_due(run, states, after, results, saves, needed=needed, here=work.here)
            begun = time.monotonic()
    return model.entering(states, None) if to_end else None


def save_here(
    run: StageRun[RunOptions],
    states: Sequence[torch.Tensor],
    index: int,
    join: Callable[[list[torch.Tensor]], torch.Tensor],
    here: Sequence[Sequence[int] | None] | None = None,
) -> None:
    """Save groups of states, joined, that enter step `index`, if they are due; stop after a signal.

    Unlike `save_when_due` it waits for the disk. `here` has for each group the places of this
    rank's states among all; None: they are all.
    """
    ranks, run.folder.manifest.cursor = run.ranks, index
    if ranks.told(run.stop.signum is not None or run.folder.states_are_due()):
        if states[0].is_pinned():
            torch.cuda.synchronize()  # copies to it may still be running
        groups = [
            group if places is None else ranks.gather(group, places)
            for group, places in zip(states, here or [None] * len(states), strict=True)
        ]
        whole = [group.cpu() for group in groups if group is not None]
        if ranks.rank == 0:
            run.folder.save_states(join(whole), index)
    run.stop_if_asked()


def save_when_due(
    run: StageRun[RunOptions],
    states: torch.Tensor,
    index: int,
    results: Background,
    saves: Background,
    *,
    needed: bool = True,
    here: Sequence[int] | None = None,
) -> None:
    """Save the states entering sublayer `index`, which may change as soon as this returns.

    After a signal they are saved at once, and the run stops when all results are stored. Rank 0
    saves, and stops.

    Args:
        run: the stage.
        states: fp32 (rows, t, hidden).
        index: of the sublayer.
        results: stores results.
        saves: saves states, unless those before are still being saved.
        needed: whether to save them without a signal.
        here: places of this rank's states among all; None: they are all.
    """
    is_last = run.stop.signum is not None
    is_due = needed and run.ranks.rank == 0 and saves.is_idle() and run.folder.states_are_due()
    if here is not None:
        is_last, is_due = run.ranks.told((is_last, is_due))
    if is_last or is_due:
        if here is not None:
            whole = run.ranks.gather(states, here)
            if whole is None:
                return
            states = whole
        if states.is_pinned():
            torch.cuda.synchronize()  # what the device puts there may be on its way
        waiting = to_host({"states": states}, hold=True)
        saves.submit(lambda: run.folder.save_states(waiting()["states"], index))
        if not states.is_cuda:
            saves.wait()  # they are not copied
    if is_last:
        results.wait()
        saves.wait()
    run.stop_if_asked()
