"""Prompts of several jobs, read together in passes."""

import torch

from exl2flow.core.errors import OutOfDeviceMemory
from exl2flow.inference.cache.views import Segment
from exl2flow.inference.generate.device_slots import DeviceSlots
from exl2flow.inference.generate.event import Event
from exl2flow.inference.generate.job import Job, Sequence
from exl2flow.inference.generate.scheduler import Scheduler

Part = tuple[Job, Sequence, int]  # a sequence, and how many of its tokens to read


class Prefill:
    """Reads at most `chunk` tokens per step, of the oldest jobs first."""

    def __init__(self, steps: DeviceSlots, schedule: Scheduler, *, chunk: int) -> None:
        self._steps, self._scheduler, self._chunk = steps, schedule, chunk

    def step(self) -> None:
        """Make one pass, if a prompt waits."""
        parts = self._next()
        try:
            self._read(parts)
        except torch.OutOfMemoryError as error:
            for part in parts:
                self._read_alone(part, error)

    def _read(self, parts: list[Part]) -> None:
        ids, segments, rows = list[int](), list[Segment](), list[torch.Tensor]()
        for job, s, count in parts:
            begin, end = s.held.filled, s.held.filled + count
            ids += s.ids[begin:end]
            known = job.prompt.rows
            rows += [known[i] for i in s.ids[begin:end] if i in known]
            segments.append(Segment(pages=tuple(s.held.pages), begin=begin, end=end))
        if ids:
            used = [job.adapters for job, _, _ in parts]
            self._steps.read(ids, segments, rows, used)
        for job, sequence, count in parts:
            held = sequence.held
            self._scheduler.table.fill(held, sequence.ids[held.filled : held.filled + count])
            total = sum(len(s.ids) - 1 for s in job.sequences)
            read = total - sum(s.unread for s in job.sequences)
            job.deliver(Event(stage="prompt", tag=job.request.tag, read=read, total=total))
            self._scheduler.begin_steps(job)

    def _read_alone(self, part: Part, error: Exception) -> None:
        torch.cuda.empty_cache()
        job, _, count = part
        try:
            if job in self._scheduler.running:
                self._read([part])
        except torch.OutOfMemoryError:
            failure = OutOfDeviceMemory(
                f"no memory is left on the GPU to read {count} tokens of a prompt; give the "
                "generator a smaller `chunk` or fewer `tokens`"
            )
            failure.__cause__ = error
            self._scheduler.end(job, job.output.finish("error", error=failure), keep=False)

    def _next(self) -> list[Part]:
        """Return what to read next, with pages for it.

        Of several sequences that continue alike, one reads, and the others take over its pages.
        """
        found, names, room = list[Part](), set[object](), self._chunk
        for job in [*self._scheduler.running]:
            for sequence in job.sequences:
                is_back = job not in self._scheduler.running  # another one took its pages
                if is_back or job.steps or not self._takes_over(job, sequence):
                    continue
                name = self._scheduler.table.next_key(sequence.held, sequence.ids)
                count = self._part(sequence, room)
                if not count or name in names:
                    continue
                if not self._scheduler.reserve(job, sequence, sequence.held.filled + count):
                    break
                names.add(name or object())
                found.append((job, sequence, count))
                room -= count
        return [part for part in found if part[0] in self._scheduler.running]

    def _takes_over(self, job: Job, sequence: Sequence) -> bool:
        """Use what the cache holds; return whether something must be read."""
        self._steps.copy(self._scheduler.table.match(sequence.held, sequence.ids))
        if sequence.unread:
            return True
        self._scheduler.begin_steps(job)
        return False

    def _part(self, sequence: Sequence, room: int) -> int:
        """Return how many tokens to read; passes end at page borders, or with the prompt."""
        if sequence.unread <= room:
            return sequence.unread
        end = sequence.held.filled + room
        return max(0, end - end % self._scheduler.table.page_tokens - sequence.held.filled)
