"""A disk that forgets what was not synced: records a block, lays out what a power cut may leave.

The rules are those that POSIX permits, which is less than most file systems keep:

- a file's writes are kept from its `fsync` on; before, any subset of their sectors of 512 or
  4,096 bytes is, also with the file's full size and zeros, and with the newest time
- an entry of a folder (made, renamed, removed) is kept from the folder's `fsync` on; before, any
  subset of them is; a rename happens as a whole, and is kept from the `fsync` of its new folder on
- a new folder is an entry of its parent: syncing it, or a file in it, does not keep it
"""

import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from file_layer import CUT, FOLDER, MAKE, REMOVE, RENAME, SYNC, WRITE, Layer

from exl2flow.core.store.files import FileRecord

SECTORS = (512, 4096)
LOCK = "lock"  # in the paths of locks
NOTE = "note"  # an event that is not a call
MOST_PENDING = 14  # events of which all subsets are tried


class Node:
    """A file or a folder of the recorded disk; compared by identity."""

    def __init__(self, *, is_folder: bool, data: bytes = b"", time: int = 0) -> None:
        self.is_folder, self.data, self.time = is_folder, data, time
        self.entries: dict[str, Node] = {}

    @classmethod
    def of(cls, path: Path) -> "Node":
        """Return what lies at a path."""
        if not path.is_dir():
            return cls(is_folder=False, data=path.read_bytes(), time=path.stat().st_mtime_ns)
        found = cls(is_folder=True)
        found.entries = {child.name: cls.of(child) for child in path.iterdir()}
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Event:
    """One change. An entry's: folder, name, and for a rename where it was; a file's: bytes."""

    kind: str
    path: str
    node: Node | None = None
    places: tuple[tuple[Node, str], ...] = ()  # of an entry: where it is, where it was
    offset: int = 0
    data: bytes = b""
    size: int = 0
    time: int = 0
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class Tear:
    """What is left of a write: sectors of this size, by bit; whether the file has its full size."""

    sector: int
    mask: int
    is_sized: bool

    def pieces(self, event: Event) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of the sectors that are left."""
        begin, end = event.offset, event.offset + len(event.data)
        first = begin // self.sector
        for index in range(first, -(-end // self.sector)):
            if self.mask >> (index - first) & 1:
                low, high = max(begin, index * self.sector), min(end, (index + 1) * self.sector)
                yield low, event.data[low - begin : high - begin]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A power cut after `prefix` events, and which of those not synced are kept, some torn."""

    prefix: int
    kept: frozenset[int]
    torn: Mapping[int, Tear] = field(default_factory=dict)


Tree = dict[str, tuple[bytes, int] | None]  # path → content and time of a file, None of a folder


class Recording(Layer):
    """The changes that a block made below a folder, and what they began with."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begin = Node.of(root)
        self.events: list[Event] = []
        self._entries: dict[Node, dict[str, Node]] = {}  # of folders, as they are now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the block; a file's time of change is taken to be that of its content.

        The former cannot be laid out.
        """
        with super().watching(), content_times():
            yield

    def note(self, value: object) -> None:
        """Remember something that happened between two events."""
        with self.lock:
            self.events.append(Event(kind=NOTE, path="", value=value))

    def _place(self, path: str) -> tuple[Node, str]:
        *parents, name = Path(path).relative_to(self.root).parts
        folder = self.begin
        for parent in parents:
            folder = self._names(folder)[parent]
        return folder, name

    def _names(self, folder: Node) -> dict[str, Node]:
        return self._entries.setdefault(folder, dict(folder.entries))

    def after(self, kind: str, path: str, **details: Any) -> None:
        """Add an event."""
        if path.endswith(" (deleted)"):
            return
        with self.lock:
            self.events.append(self._event(kind, path, details))

    def _event(self, kind: str, path: str, details: Mapping[str, Any]) -> Event:
        if path == self.root:
            return Event(kind=kind, path=".", node=self.begin)
        here = self._place(path)
        names, name = self._names(here[0]), here[1]
        shown = os.path.relpath(path, self.root)
        if kind in (MAKE, FOLDER):
            node = names[name] = Node(is_folder=kind == FOLDER, time=os.stat(path).st_mtime_ns)
            return Event(kind=kind, path=shown, node=node, places=(here,))
        if kind == RENAME:
            there = self._place(details["source"])
            node = names[name] = self._names(there[0]).pop(there[1])
            was = os.path.relpath(details["source"], self.root)
            return Event(kind=kind, path=shown, node=node, places=(here, there), value=was)
        if kind == REMOVE:
            return Event(kind=kind, path=shown, node=names.pop(name), places=(here,))
        time = os.stat(path).st_mtime_ns
        return Event(kind=kind, path=shown, node=names[name], time=time, **details)

    def pending(self, prefix: int) -> list[int]:
        """Return which of the first events no sync has made lasting."""
        synced: set[Node | None] = set()
        found = []
        for index in reversed(range(prefix)):
            event = self.events[index]
            holder = event.places[0][0] if event.places else event.node
            if event.kind == SYNC:
                synced.add(holder)
            elif event.kind != NOTE and holder not in synced:
                found.append(index)
        return found[::-1]

    def left(self, cut: Cut) -> Tree:
        """Return what a power cut leaves."""
        lost = set(self.pending(cut.prefix)) - cut.kept
        entries: dict[Node, dict[str, Node]] = {}
        contents: dict[Node, bytearray] = {}
        times: dict[Node, int] = {}
        for index, event in enumerate(self.events[: cut.prefix]):
            if event.kind in (WRITE, CUT) and event.node:
                times[event.node] = event.time  # the newest, whatever is left of the content
            if index not in lost:
                _apply(event, cut.torn.get(index), entries, contents)
        tree: Tree = {}

        def collect(folder: Node, path: str) -> None:
            for name, node in entries.get(folder, folder.entries).items():
                where = f"{path}{name}"
                if node.is_folder:
                    tree[where] = None
                    collect(node, f"{where}/")
                else:
                    data = bytes(contents.get(node, node.data))
                    tree[where] = (data, times.get(node, node.time))

        collect(self.begin, "")
        return tree

    def described(self, cut: Cut) -> str:
        """Return what of a power cut's last changes is lost or torn, for people; no locks."""
        pending = [i for i in self.pending(cut.prefix) if LOCK not in self.events[i].path]
        lost = [self._named(i) for i in pending if i not in cut.kept]
        torn = [f"{self._named(i)} as {cut.torn[i]}" for i in pending if i in cut.torn]
        last = self._named(cut.prefix - 1) if cut.prefix else "nothing"
        return f"after {last}, event {cut.prefix} of {len(self.events)}; lost {lost}, torn {torn}"

    def _named(self, index: int) -> str:
        event = self.events[index]
        return f"{event.kind} {event.path or type(event.value).__name__}"

    def drawn(self, draw: random.Random) -> Cut:
        """Draw a power cut."""
        prefix = draw.randint(0, len(self.events))
        pending = self.pending(prefix)
        kept = set(pending)
        way = draw.randrange(5)
        if way == 0:
            kept = set()
        elif way == 1:
            kept = {index for index in pending if draw.random() < 0.5}
        elif way == 2 and pending:
            kept -= {draw.choice(pending)}
        elif way == 3 and pending:
            kept = {draw.choice(pending)}
        torn = {}
        for index in sorted(kept):
            if self.events[index].kind == WRITE and draw.random() < 0.7:
                sector = draw.choice(SECTORS)
                count = sectors_of(self.events[index], sector)
                ways = (draw.getrandbits(count), (1 << draw.randint(0, count)) - 1)
                is_sized = draw.random() < 0.5
                torn[index] = Tear(sector=sector, mask=draw.choice(ways), is_sized=is_sized)
        return Cut(prefix=prefix, kept=frozenset(kept), torn=torn)

    def every(self) -> Iterator[Cut]:
        """Yield every power cut; locks are all kept or all lost, because nobody reads them.

        A torn write has any subset of up to four sectors; of more, each prefix and each hole.
        """
        for prefix in range(len(self.events) + 1):
            pending = self.pending(prefix)
            together = frozenset(i for i in pending if LOCK in self.events[i].path)
            single = [i for i in pending if i not in together]
            assert len(single) <= MOST_PENDING, self.described(Cut(prefix=prefix, kept=together))
            ways = [[None, *_ways(self.events[index])] for index in single]
            for locks in (together, frozenset[int]())[: 1 + bool(together)]:
                for chosen in product(*ways):
                    kept = {i: way for i, way in zip(single, chosen, strict=True) if way}
                    torn = {i: way for i, way in kept.items() if isinstance(way, Tear)}
                    yield Cut(prefix=prefix, kept=locks | frozenset(kept), torn=torn)


def _ways(event: Event) -> list[Tear | bool]:
    """Return how an event may be kept: True for as it is, or torn."""
    found: list[Tear | bool] = [True]
    for sector in SECTORS if event.kind == WRITE else ():
        count = sectors_of(event, sector)
        whole = (1 << count) - 1
        masks = set(range(whole)) if count <= 4 else {(1 << i) - 1 for i in range(count)}
        masks |= {whole ^ (1 << i) for i in range(count)}
        found += [Tear(sector=sector, mask=m, is_sized=s) for m in masks for s in (False, True)]
    return found


def sectors_of(event: Event, sector: int) -> int:
    """Return how many sectors a write touches."""
    return -(-(event.offset + len(event.data)) // sector) - event.offset // sector


def _apply(
    event: Event,
    tear: Tear | None,
    entries: dict[Node, dict[str, Node]],
    contents: dict[Node, bytearray],
) -> None:
    """Let an event happen to what is left."""
    node = event.node
    if event.kind in (WRITE, CUT) and node:
        content = contents.setdefault(node, bytearray(node.data))
        if event.kind == CUT:
            content[event.size :] = bytes(max(event.size - len(content), 0))
            return
        pieces = [(event.offset, event.data)] if tear is None else list(tear.pieces(event))
        ends = [offset + len(data) for offset, data in pieces]
        if tear is None or tear.is_sized:
            ends.append(event.offset + len(event.data))
        content.extend(bytes(max(max(ends, default=0) - len(content), 0)))
        for offset, data in pieces:
            content[offset : offset + len(data)] = data
        return
    for index, (folder, name) in enumerate(event.places):
        names = entries.setdefault(folder, dict(folder.entries))
        if event.kind == REMOVE or index == 1:
            if names.get(name) is node:
                del names[name]
        elif node:
            names[name] = node


@contextmanager
def content_times() -> Iterator[None]:
    """Let records of files take the time of the content for that of the file, as is laid out."""
    of = FileRecord.of

    def of_content(path: Path, *, sha256: str | None) -> FileRecord:
        found = of(path, sha256=sha256)
        return found.model_copy(update={"ctime_ns": found.mtime_ns})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileRecord, "of", of_content)
        yield


def tree_of(root: Path) -> Tree:
    """Return what lies in a folder."""
    return {
        str(path.relative_to(root)): None
        if path.is_dir()
        else (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
    }


def lay_out(tree: Tree, root: Path) -> None:
    """Make a folder hold exactly this tree."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name, content in tree.items():  # folders come before what they hold
        path = root / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content[0])
            os.utime(path, ns=(content[1], content[1]))
