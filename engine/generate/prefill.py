"""Chunked prefill: prompts of several jobs in one pass."""

import torch

from exl2flow.core.errors import OutOfDeviceMemory
from exl2flow.engine.cache.views import Segment
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.event import Event
from exl2flow.engine.generate.job import Job, Sequence
from exl2flow.engine.generate.page_loader import PageLoader
from exl2flow.engine.generate.scheduler import Scheduler

Chunk = tuple[Job, Sequence, int]  # a sequence, and how many of its tokens to read


class Prefill:
    """Reads at most `chunk` tokens per step, of the oldest jobs first."""

    def __init__(
        self,
        device_slots: DeviceSlots,
        scheduler: Scheduler,
        loader: PageLoader | None = None,
        *,
        chunk: int,
    ) -> None:
        self._device_slots, self._scheduler, self._chunk = device_slots, scheduler, chunk
        self._loader = loader

    def step(self) -> None:
        """Run one pass, if a prompt waits."""
        chunks = self._next()
        try:
            self._read(chunks)
        except torch.OutOfMemoryError as error:
            for chunk in chunks:
                self._read_alone(chunk, error)
        else:
            self._note_read(chunks)

    def _read(self, chunks: list[Chunk]) -> None:
        """Read chunks on the device; until `_note_read` they count as unread."""
        ids, segments, embeddings = list[int](), list[Segment](), list[torch.Tensor]()
        for job, s, count in chunks:
            begin, end = s.held.filled, s.held.filled + count
            ids += s.ids[begin:end]
            known = job.prompt.embeddings
            embeddings += [known[i] for i in s.ids[begin:end] if i in known]
            pages = tuple(s.held.pages)
            segments.append(Segment(pages=pages, begin=begin, end=end, slot=s.slot))
        if ids:
            adapters = [job.adapters for job, _, _ in chunks]
            is_scoring = any(s.is_scoring for _, s, _ in chunks)
            states = self._device_slots.read(ids, segments, embeddings, adapters, states=is_scoring)
            if is_scoring:
                self._score(chunks, states)

    def _note_read(self, chunks: list[Chunk]) -> None:
        """Note that chunks were read, and let jobs whose prompts are read take part in steps."""
        for job, sequence, count in chunks:
            if job not in self._scheduler.running:
                continue
            held = sequence.held
            self._scheduler.page_pool.fill(held, sequence.ids[held.filled : held.filled + count])
            self._scheduler.states.has_read(sequence.slot, held)
            total = sum(len(s.ids) - 1 for s in job.sequences)
            read = total - sum(s.unread for s in job.sequences)
            job.deliver(Event(stage="prompt", tag=job.request.tag, read=read, total=total))
            self._scheduler.begin_steps(job)

    def _score(self, chunks: list[Chunk], states: torch.Tensor) -> None:
        """Score the tokens after those of a pass, from the hidden states (t, hidden) of all."""
        split = states.split_with_sizes([count for _, _, count in chunks])
        for (_, s, count), of_chunk in zip(chunks, split, strict=True):
            if s.scorer is None or s.scorer.is_complete:
                continue
            ids = s.scorer.next_ids(s.held.filled, s.held.filled + count)
            if ids:
                s.scorer.add(self._device_slots.scores(of_chunk[-len(ids) :], ids, s.scorer.top))

    def _read_alone(self, chunk: Chunk, error: Exception) -> None:
        """Read a chunk again that was perhaps read in part; end its job if memory ends again."""
        torch.cuda.empty_cache()
        job, sequence, count = chunk
        if job not in self._scheduler.running:
            return
        try:
            if self._scheduler.lose_state(sequence):
                count = self._chunk_size(sequence, count)
                if not self._scheduler.reserve(job, sequence, sequence.held.filled + count):
                    return
            again = [(job, sequence, count)]
            self._read(again)
        except torch.OutOfMemoryError:
            failure = OutOfDeviceMemory(
                f"no memory is left on the GPU to read {count} tokens of a prompt; give the "
                "generator a smaller `chunk` or fewer `tokens`"
            )
            failure.__cause__ = error
            self._scheduler.end(job, job.output.finish("error", error=failure), keep=False)
        else:
            self._note_read(again)

    def _next(self) -> list[Chunk]:
        """Return the next chunks, with pages reserved for them.

        Of several sequences that continue alike, one reads, and the others take over its pages.
        """
        chunks, keys, room = list[Chunk](), set[object](), self._chunk
        page_pool, loader = self._scheduler.page_pool, self._loader
        if loader is not None:
            loader.begin_step()
        for job in [*self._scheduler.running]:
            for sequence in job.sequences:
                if job.is_decoding or job not in self._scheduler.running:
                    continue  # in the latter case another one took its pages
                if loader is not None and loader.waits(job, sequence):
                    continue
                self._device_slots.copy(page_pool.match(sequence.held, sequence.reusable))
                self._scheduler.states.follow(sequence.slot, sequence.held)
                if not sequence.unread:
                    self._scheduler.begin_steps(job)
                    continue
                key = page_pool.next_key(sequence.held, sequence.ids)
                count = self._chunk_size(sequence, room)
                if not count or (key in keys and not sequence.is_scoring):
                    continue
                if not self._scheduler.reserve(job, sequence, sequence.held.filled + count):
                    break
                keys.add(key or object())
                chunks.append((job, sequence, count))
                room -= count
        return [chunk for chunk in chunks if chunk[0] in self._scheduler.running]

    def _chunk_size(self, sequence: Sequence, room: int) -> int:
        """Return how many tokens to read; passes end at page borders, or with the prompt."""
        if sequence.unread <= room:
            return sequence.unread
        end = sequence.held.filled + room
        return max(0, end - end % self._scheduler.page_pool.page_tokens - sequence.held.filled)
