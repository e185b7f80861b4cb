"""Prompts of several jobs, read together in passes."""

from dataclasses import dataclass, field

import torch

from exl2flow.core.errors import OutOfDeviceMemory
from exl2flow.inference.cache.paged import Segment
from exl2flow.inference.generate.event import Event
from exl2flow.inference.generate.job import Job, Sequence
from exl2flow.inference.generate.schedule import Schedule
from exl2flow.inference.generate.steps import Steps


@dataclass(slots=True)
class Pass:
    """Tokens to read together: for each part its job, sequence and how many of its tokens."""

    parts: list[tuple[Job, Sequence, int]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Tokens of all parts, one after another."""
        return [
            token
            for _, s, count in self.parts
            for token in s.ids[s.held.filled : s.held.filled + count]
        ]

    @property
    def segments(self) -> list[Segment]:
        """Where the parts belong."""
        return [
            Segment(pages=tuple(s.held.pages), begin=s.held.filled, end=s.held.filled + count)
            for _, s, count in self.parts
        ]


class Reading:
    """Reads at most `chunk` tokens per step, of the oldest jobs first."""

    def __init__(self, steps: Steps, schedule: Schedule, *, chunk: int) -> None:
        self._steps, self._schedule, self._chunk = steps, schedule, chunk

    def step(self) -> None:
        """Make one pass, if a prompt waits."""
        work = self._next()
        if work is None:
            return
        try:
            self._read(work)
        except torch.OutOfMemoryError as error:
            for part in work.parts:
                self._read_alone(part[0], Pass([part]), error)

    def _read(self, work: Pass) -> None:
        self._steps.read(work.ids, work.segments)
        self._has_read(work)

    def _read_alone(self, job: Job, work: Pass, error: Exception) -> None:
        torch.cuda.empty_cache()
        try:
            if job in self._schedule.running:
                self._read(work)
        except torch.OutOfMemoryError:
            count = sum(count for *_, count in work.parts)
            failure = OutOfDeviceMemory(
                f"no memory is left on the GPU to read {count} tokens of a prompt; give the "
                "generator a smaller `chunk` or fewer `tokens`"
            )
            failure.__cause__ = error
            self._schedule.end(job, job.output.finish("error", error=failure), keep=False)

    def _next(self) -> Pass | None:
        """Return what to read next, with pages for it; None if all prompts are read.

        Of several sequences that continue alike, one reads, and the others take over its pages.
        """
        found, names, room = Pass(), set[object](), self._chunk
        for job in [*self._schedule.running]:
            for sequence in job.sequences:
                is_back = job not in self._schedule.running  # another one took its pages
                if is_back or job.steps or not self._takes_over(job, sequence):
                    continue
                name = self._schedule.table.next_key(sequence.held, sequence.ids)
                count = self._part(sequence, room)
                if not count or name in names:
                    continue
                if not self._schedule.reserve(job, sequence, sequence.held.filled + count):
                    break
                names.add(name or object())
                found.parts.append((job, sequence, count))
                room -= count
        found.parts = [part for part in found.parts if part[0] in self._schedule.running]
        return found if found.parts else None

    def _takes_over(self, job: Job, sequence: Sequence) -> bool:
        """Use what the cache holds; return whether something must be read."""
        copy = self._schedule.table.match(sequence.held, sequence.ids)
        if copy is not None:
            self._steps.cache.copy([copy])
        if sequence.unread:
            return True
        self._schedule.begin_steps(job)
        return False

    def _part(self, sequence: Sequence, room: int) -> int:
        """Return how many tokens to read; passes end at page borders, or with the prompt."""
        if sequence.unread <= room:
            return sequence.unread
        end = sequence.held.filled + room
        return max(0, end - end % self._schedule.table.page_tokens - sequence.held.filled)

    def _has_read(self, done: Pass) -> None:
        """Note that a pass has been made."""
        for job, sequence, count in done.parts:
            held = sequence.held
            self._schedule.table.fill(held, sequence.ids[held.filled : held.filled + count])
            total = sum(len(s.ids) - 1 for s in job.sequences)
            read = total - sum(s.unread for s in job.sequences)
            job.deliver(Event(stage="prompt", tag=job.request.tag, read=read, total=total))
            self._schedule.begin_steps(job)
