"""The page table as a machine: sequences come, read, rewind and go over a simulated device."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exl2flow.engine.cache.page_pool import Copy, PagePool
from exl2flow.engine.cache.prefix_tree import ID_BYTES, SequencePages, packed

SIZE = 4  # tokens per page
COUNT = 9
SALTS = (b"", b"adapter")
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE + 1)
PICK = st.integers(0, 99)  # which sequence, how many tokens: modulo what there is


@dataclass(frozen=True)
class Row:
    """What keys and values at one position depend on: all ids up to it, and faults."""

    ids: tuple[bytes | int, ...]
    faults: frozenset[int]


@dataclass(eq=False)
class Sequence:
    held: SequencePages
    ids: list[int]
    faults: set[int] = field(default_factory=set)  # which its last rows depend on

    def prefix(self, length: int) -> tuple[bytes | int, ...]:
        return (self.held.root, *self.ids[:length])


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.table = PagePool(COUNT, page_tokens=SIZE)
        self.rows: list[list[Row | None]] = [[None] * SIZE for _ in range(COUNT)]
        self.running: list[Sequence] = []
        self.past: list[tuple[bytes, list[int]]] = [(b"", [0] * SIZE)]
        self.faults = 0
        self.ended_faults: set[int] = set()

    # what the engine and the device do

    def row(self, held: SequencePages, position: int) -> Row:
        row = self.rows[held.pages[position // SIZE]][position % SIZE]
        assert row is not None
        return row

    def copy(self, copy: Copy | None) -> None:
        if copy is not None:
            assert copy.source != copy.target
            self.rows[copy.target][: copy.tokens] = self.rows[copy.source][: copy.tokens]

    def add(self, salt: bytes, ids: list[int]) -> Sequence:
        self.running.append(Sequence(self.table.begin(salt), list(ids)))
        self.past.append((salt, list(ids)))
        return self.running[-1]

    def match(self, seq: Sequence) -> None:
        """Match, and compare what was found with a search through everything listed."""
        held, before = seq.held, seq.held.filled
        pages, cached, free = list(held.pages), held.cached, self.table.free
        expected = before if before % SIZE or self.is_forgotten(seq) else self.best(seq)
        needed = self.table.needs(held, seq.ids)
        shared_used = self.table.free

        self.copy(self.table.match(held, seq.ids))

        assert held.filled <= max(before, len(seq.ids) - 1)
        assert held.cached - cached == held.filled - before
        if self.table.free or free > len(held.pages) - len(pages):
            assert held.filled == expected
        left = -(-len(seq.ids) // SIZE) - len(held.pages)
        assert needed == max(0, shared_used - self.table.free + left)

    def read(self, seq: Sequence, count: int, fault: int | None = None) -> bool:
        """Reserve, write on the device, then record."""
        held, table = seq.held, self.table
        end = held.filled + count
        order, missing = list(table._free), -(-end // SIZE) - len(held.pages)
        if not table.reserve(held, end):
            assert missing > table.free
            assert list(table._free) == order
            return False
        assert held.pages[len(held.pages) - max(0, missing) :] == order[: max(0, missing)]
        faults = {f for at in range(held.filled) for f in self.row(held, at).faults}
        faults |= {fault} if fault is not None else set()
        for at in range(held.filled, end):
            assert table.pages[held.pages[at // SIZE]].users == 1
            self.rows[held.pages[at // SIZE]][at % SIZE] = Row(
                seq.prefix(at + 1), frozenset(faults)
            )
        old = list(held.pages)
        changed = table.fill(held, seq.ids[held.filled : end])
        assert changed == [i for i, page in enumerate(held.pages) if page != old[i]]
        seq.faults |= faults
        return True

    def end(self, seq: Sequence, *, keep: bool = True) -> None:
        if not keep:
            self.ended_faults |= {
                f for at in range(seq.held.filled) for f in self.row(seq.held, at).faults
            }
        self.table.release(seq.held, keep=keep)
        self.running.remove(seq)

    # what the table should know

    def is_forgotten(self, seq: Sequence) -> bool:
        held = seq.held
        used = held.pages[: -(-held.filled // SIZE)]
        return any(not self.table.pages[page].content for page in used)

    def listed(self) -> dict[tuple[bytes | int, ...], int]:
        """Return what each listed page holds: salt and all ids up to its last one."""
        found = {}
        for page, record in enumerate(self.table.pages):
            if record.content:
                row = self.rows[page][len(record.content) // ID_BYTES - 1]
                assert row is not None
                found[row.ids] = page
        return found

    def best(self, seq: Sequence) -> int:
        """Return the most tokens of a sequence that listed pages hold, by looking at all."""
        listed, last, filled = self.listed(), len(seq.ids) - 1, seq.held.filled
        while filled + SIZE <= last and seq.prefix(filled + SIZE) in listed:
            filled += SIZE
        start, most = seq.prefix(filled), 0
        for ids in listed:
            common = 0
            while common < last - filled and ids[: len(start) + common + 1] == seq.prefix(
                filled + common + 1
            ):
                common += 1
            at_this_page = (len(ids) - 2) // SIZE * SIZE == filled
            most = max(most, common if at_this_page else 0)
        return filled + (most if most > 1 else 0)

    # rules

    @rule(salt=st.sampled_from(SALTS), ids=IDS)
    def begin(self, salt: bytes, ids: list[int]) -> None:
        self.match(self.add(salt, ids))

    @rule(which=PICK, kept=PICK, more=st.lists(st.integers(0, 1), max_size=SIZE))
    def begin_like_an_earlier_one(self, which: int, kept: int, more: list[int]) -> None:
        salt, ids = self.past[which % len(self.past)]
        self.match(self.add(salt, ids[: kept % len(ids) + 1] + more))

    @rule(which=PICK, room=PICK)
    def read_two_alike_in_one_pass(self, which: int, room: int) -> None:
        """Two sequences that know nothing of each other fill the same pages."""
        salt, ids = self.past[which % len(self.past)]
        twins = [self.add(salt, [*ids, room % 2, 0, 1, 0, 1]) for _ in range(2)]
        for seq in twins:
            self.match(seq)
        for seq in twins:
            if len(seq.ids) - 1 > seq.held.filled:
                self.read(seq, len(seq.ids) - 1 - seq.held.filled)

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def match_again(self, which: int) -> None:
        self.match(self.running[which % len(self.running)])

    @precondition(lambda self: self.running)
    @rule(which=PICK, pages=st.integers(1, 2))
    def read_a_chunk(self, which: int, pages: int) -> None:
        seq = self.running[which % len(self.running)]
        end = min(seq.held.filled // SIZE * SIZE + pages * SIZE, len(seq.ids) - 1)
        if end > seq.held.filled:
            self.read(seq, end - seq.held.filled)

    @precondition(lambda self: self.running)
    @rule(which=PICK, ids=st.lists(st.integers(0, 1), min_size=1, max_size=SIZE + 1))
    def decode(self, which: int, ids: list[int]) -> None:
        seq = self.running[which % len(self.running)]
        if len(seq.ids) - seq.held.filled > 1 and not self.read(
            seq, len(seq.ids) - 1 - seq.held.filled
        ):
            return
        for new in ids:
            if not self.read(seq, 1):
                return
            seq.ids.append(new)

    @precondition(lambda self: any(seq.held.filled < len(seq.ids) for seq in self.running))
    @rule(which=PICK)
    def read_with_a_fault(self, which: int) -> None:
        seq = self.running[which % len(self.running)]
        self.faults += 1
        if seq.held.filled < len(seq.ids):
            self.read(seq, len(seq.ids) - seq.held.filled, self.faults)

    @precondition(lambda self: self.running)
    @rule(which=PICK, more=st.integers(1, SIZE * 2))
    def reserve_only(self, which: int, more: int) -> None:
        seq = self.running[which % len(self.running)]
        self.table.reserve(seq.held, seq.held.filled + more)

    @precondition(lambda self: self.running)
    @rule(which=PICK, tokens=PICK, other=st.integers(0, 1))
    def cut(self, which: int, tokens: int, other: int) -> None:
        seq = self.running[which % len(self.running)]
        held, tokens = seq.held, tokens % (seq.held.filled + 1)
        had_room = self.table.free

        self.copy(self.table.cut(held, tokens))

        kept = tokens if tokens > 1 else 0
        assert held.filled == kept or (not had_room and held.filled == tokens // SIZE * SIZE)
        assert len(held.pages) == -(-held.filled // SIZE)
        seq.ids[tokens:] = [other]

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def release(self, which: int) -> None:
        self.end(self.running[which % len(self.running)])

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def release_and_forget(self, which: int) -> None:
        seq = self.running[which % len(self.running)]
        forgotten = self.is_forgotten(seq)
        filled = seq.held.filled
        self.end(seq, keep=False)

        again = self.table.begin(seq.held.root)
        copy = self.table.match(again, [*seq.ids[:filled], 0])
        self.copy(copy)
        assert forgotten or again.filled == 0
        self.table.release(again)

    @precondition(
        lambda self: any(row.faults for seq in self.running for row in self.read_rows(seq))
    )
    @rule()
    def notice_a_fault(self) -> None:
        for seq in list(self.running):
            if any(row.faults for row in self.read_rows(seq)):
                self.end(seq, keep=False)
                return

    def read_rows(self, seq: Sequence) -> list[Row]:
        return [self.row(seq.held, at) for at in range(seq.held.filled)]

    @precondition(lambda self: self.running)
    @rule(which=PICK)
    def preempt_and_hit(self, which: int) -> None:
        seq = self.running[which % len(self.running)]
        filled, forgotten = min(seq.held.filled, len(seq.ids) - 1), self.is_forgotten(seq)
        self.end(seq)
        had_room = bool(self.table.free)  # for a copy of a page that others use
        again = self.add(seq.held.root, seq.ids)
        self.match(again)

        if not forgotten and had_room:
            assert again.held.filled >= filled - (filled % SIZE == 1)

    @rule()
    def clear(self) -> None:
        self.table.clear()
        assert not any(self.table.pages[page].content for page in self.table._free)

    # what always holds

    @invariant()
    def users_are_sequences(self) -> None:
        held = [page for seq in self.running for page in seq.held.pages]
        for page, record in enumerate(self.table.pages):
            assert record.users == held.count(page)
        assert set(self.table._free) == set(range(COUNT)) - set(held)
        assert self.table.free == COUNT - len(set(held))

    @invariant()
    def sequences_read_what_they_wrote(self) -> None:
        for seq in self.running:
            for at, row in enumerate(self.read_rows(seq)):
                assert row.ids == seq.prefix(at + 1)

    @invariant()
    def what_is_listed_is_there(self) -> None:
        table, entries = self.table, 0
        chains = dict.fromkeys(SALTS, 0) | {
            key: len(self.prefix_of(page)) - 1 for key, page in table._listed.full.items()
        }
        for page, record in enumerate(table.pages):
            assert (record.key is None) or table._listed.full[record.key] == page
            if not record.content:
                assert record.key is None
                continue
            entries += 1
            tokens = len(record.content) // ID_BYTES
            prefix = self.prefix_of(page)
            assert (record.key is not None) == (tokens == SIZE)
            assert packed(prefix[-tokens:]) == record.content
            assert chains[record.before] == len(prefix) - 1 - tokens
            if record.before in table._listed.full:
                assert self.prefix_of(table._listed.full[record.before]) == prefix[:-tokens]
            else:
                assert record.before == prefix[0]
            assert (record.content, page) in table._listed.after[record.before]
        assert sum(map(len, table._listed.after.values())) == entries
        assert all(pages == sorted(pages) and pages for pages in table._listed.after.values())

    def prefix_of(self, page: int) -> tuple[bytes | int, ...]:
        row = self.rows[page][len(self.table.pages[page].content) // ID_BYTES - 1]
        assert row is not None
        return row.ids

    @invariant()
    def ends_are_evicted_before_beginnings(self) -> None:
        table, order = self.table, list(self.table._free)
        with_content = [bool(table.pages[page].content) for page in order]
        assert with_content == sorted(with_content)
        for page, record in enumerate(table.pages):
            parent = table._listed.full.get(record.before) if record.content else None
            if parent is not None and parent in table._free:
                assert order.index(page) < order.index(parent)

    @invariant()
    def faults_end_with_their_sequence(self) -> None:
        for page, record in enumerate(self.table.pages):
            for row in self.rows[page][: len(record.content) // ID_BYTES]:
                assert row is not None
                assert not row.faults & self.ended_faults

    def teardown(self) -> None:
        for seq in getattr(self, "running", []):
            self.table.release(seq.held)
        if hasattr(self, "table"):
            assert self.table.free == COUNT


TestPages = Machine.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=50)


@pytest.mark.slow
class TestMorePages(Machine.TestCase):
    """Other examples in each run; those of the usual profile are always the same."""

    settings = settings(
        max_examples=1500, stateful_step_count=50, derandomize=False, print_blob=True
    )
