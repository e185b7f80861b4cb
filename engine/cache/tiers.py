"""`Tiers`: full pages that left the cache, in host memory and on disk, until they are needed again.

Pages are copied to the host in the stream of the steps, so before anything overwrites them. Those
that leave host memory, the least recently used first, are written to disk by a thread. The page
pool knows nothing of tensors: it tells which page leaves.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby, takewhile
from typing import NamedTuple

import torch

from exl2flow.core.store.files import tensor_bytes
from exl2flow.engine.cache.page_files import PageFiles
from exl2flow.engine.cache.prefix_tree import FullPage
from exl2flow.kernels import get_ops

LEAST_FOUND = 2  # pages in a row that are worth waiting for
MOST_QUEUED = 64  # pages that wait to be written; further ones are dropped
READERS = min(16, os.cpu_count() or 1)
AHEAD_BYTES = 1 << 29  # of host memory, for pages that are read before they enter the cache


class HostPage(NamedTuple):
    """A page in host memory: uint8 (bytes,), there after the events."""

    page: FullPage
    data: torch.Tensor
    copied: tuple[torch.cuda.Event, ...] = ()

    @property
    def content(self) -> memoryview:
        """The bytes, once they are there."""
        for event in self.copied:
            event.synchronize()
        return tensor_bytes(self.data)


class PageBytes:
    """Pages of several stores as bytes of host memory.

    nbytes: of a page in all stores; host_bytes: of the memory that it takes on the host.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], page_tokens: int) -> None:
        """Take the tensors of all layers, (slots, …), of a cache; see `PagedCache.tensors`."""
        ordered = sorted(tensors, key=lambda x: str(x.device))  # stable
        rows = [x.view(torch.uint8).view(len(x) // page_tokens, -1) for x in ordered]
        self._of_device = [[*group] for _, group in groupby(rows, key=lambda x: x.device)]
        self._sizes = [sum(x.shape[1] for x in group) for group in self._of_device]
        self._is_pinned = any(x.is_cuda for x in rows)
        self.nbytes = sum(self._sizes)
        rounded = 1 << (self.nbytes - 1).bit_length()  # by torch, if it is pinned
        self.host_bytes = rounded if self._is_pinned else self.nbytes

    def empty(self) -> torch.Tensor:
        """Return host memory for a page."""
        return torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def warm_up(self, count: int) -> None:
        """Allocate pinned memory for `count` pages, which torch keeps and reuses."""
        if self._is_pinned:
            _ = [self.empty() for _ in range(count)]

    def save(self, index: int, page: FullPage) -> HostPage:
        """Copy a page to the host, after what was launched before."""
        data, events = self.empty(), list[torch.cuda.Event]()
        for part, group in zip(data.split_with_sizes(self._sizes), self._of_device, strict=True):
            part.copy_(get_ops(group[0].device).get_page(group, index), non_blocking=True)
            if group[0].is_cuda:
                events.append(torch.cuda.current_stream(group[0].device).record_event())
        return HostPage(page, data, tuple(events))

    def load(self, index: int, data: torch.Tensor) -> None:
        """Copy the bytes of a page to where it is, before what is launched later."""
        for part, group in zip(data.split_with_sizes(self._sizes), self._of_device, strict=True):
            here = part.to(group[0].device, non_blocking=True)
            get_ops(here.device).put_page(group, index, here)


class Tiers:
    """Host memory and disk below a cache; all but reading and writing files is the caller's thread.

    ahead: pages that may be read before they enter the cache.
    Raises nothing: what cannot be kept or read is computed again.
    """

    def __init__(self, pages: PageBytes, *, ram: int, files: PageFiles | None) -> None:
        """Keep at most `ram` bytes in host memory, and what leaves it in files."""
        self._pages, self._most, self._files = pages, ram // pages.host_bytes, files
        self.ahead = max(2, AHEAD_BYTES // pages.host_bytes)
        self._ram = OrderedDict[bytes, HostPage]()  # in the order of eviction
        self._queued = dict[bytes, HostPage]()
        self._reader = ThreadPoolExecutor(READERS, "exl2flow-pages")
        self._writer = ThreadPoolExecutor(1, "exl2flow-page-writer")
        if files is not None:
            pages.warm_up(self.ahead)

    def take(self, index: int, page: FullPage) -> None:
        """See `LowerTier`."""
        if page.key in self._ram:
            self._ram.move_to_end(page.key)
        elif self._most or self._may_write(page):
            if (saved := self._saved(index, page)) is None:
                return
            self._ram[page.key] = saved
            while len(self._ram) > self._most:
                self._write(self._ram.popitem(last=False)[1])

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `LowerTier`; what follows the pages is forgotten, too."""
        gone = {*keys}
        kept = [one.page for one in (*self._ram.values(), *self._queued.copy().values())]
        while following := {page.key for page in kept if page.before in gone} - gone:
            gone |= following
        for key in gone:
            self._ram.pop(key, None)
            self._queued.pop(key, None)
        if self._files is not None:
            self._writer.submit(self._files.delete, gone)  # after what it writes now

    def find(self, pages: Iterable[FullPage]) -> list[FullPage]:
        """Return the first pages, as far as they are here; none if they are not worth waiting."""
        found = [*takewhile(self._has, pages)]
        if len(found) < LEAST_FOUND:
            return []
        for page in reversed(found):  # the beginning stays longest
            if page.key in self._ram:
                self._ram.move_to_end(page.key)
            elif self._files is not None:
                self._files.touch(page)
        return found

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that each tier takes; of the disk, with the pages of other models."""
        used = 0 if self._files is None else self._files.used
        return {"ram": len(self._ram) * self._pages.host_bytes, "disk": used}

    def read(self, page: FullPage) -> tuple[str, Future[torch.Tensor | None]]:
        """Return the tier and the bytes of a page, None if they cannot be trusted."""
        known = self._ram.get(page.key) or self._queued.get(page.key)
        if self._files is not None and known is None:
            return "disk", self._reader.submit(self._read, self._files, page)
        is_same = known is not None and known.page == page
        result = Future[torch.Tensor | None]()
        result.set_result(known.data if known is not None and is_same else None)
        return "ram", result

    def load(self, index: int, data: torch.Tensor) -> bool:
        """Copy bytes that `read` returned to a page of the cache; False: no memory is left."""
        try:
            self._pages.load(index, data)
        except (RuntimeError, MemoryError):
            return False
        return True

    def close(self, pages: Iterable[tuple[int, FullPage]] | None) -> None:
        """Write host memory to disk, and pages of the cache, the last one to be kept longest.

        Nothing is kept or found any more. None: the device has failed, so nothing is written.
        """
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        files, self._files, self._most = self._files, None, 0
        if files is not None and pages is not None:
            for kept in self._ram.values():
                _write(files, kept)
            for index, page in pages:
                if files.has(page):
                    files.touch(page)
                elif not files.is_off and (saved := self._saved(index, page)) is not None:
                    _write(files, saved)
        self._ram.clear()

    def _saved(self, index: int, page: FullPage) -> HostPage | None:
        """Copy a page to the host; None: no memory is left for it."""
        try:
            return self._pages.save(index, page)
        except (RuntimeError, MemoryError):
            return None

    def _has(self, page: FullPage) -> bool:
        if page.key in self._ram or page.key in self._queued:
            return True
        return self._files is not None and self._files.has(page)

    def _may_write(self, page: FullPage) -> bool:
        if self._files is None or self._files.is_off or len(self._queued) >= MOST_QUEUED:
            return False
        if is_there := self._files.has(page):
            self._files.touch(page)
        return not is_there

    def _write(self, kept: HostPage) -> None:
        if self._files is not None and self._may_write(kept.page):
            self._queued[kept.page.key] = kept
            self._writer.submit(self._write_queued, self._files, kept)

    def _write_queued(self, files: PageFiles, kept: HostPage) -> None:
        if kept.page.key in self._queued:  # else it was forgotten
            _write(files, kept)
            self._queued.pop(kept.page.key, None)

    def _read(self, files: PageFiles, page: FullPage) -> torch.Tensor | None:
        try:
            data = self._pages.empty()
        except (RuntimeError, MemoryError):
            return None
        return data if files.read(page, tensor_bytes(data)) else None


def _write(files: PageFiles, kept: HostPage) -> None:
    """Write a page, unless the device failed while it was copied."""
    with suppress(RuntimeError, MemoryError):
        files.write(kept.page, kept.content)
