"""`PagePool`: allocates pages, counts their users, and keeps the prefix cache. No tensors.

The key of a full page is a hash of all ids up to its end, so equal beginnings share pages. Content
forms a tree: a page is *listed* under the key of the pages before it, and only while those are
listed, too. Without users it stays listed until it is evicted: least recently used first, the end
of a sequence before its beginning.

The caller runs everything in one stream and issues a `Copy` as soon as it gets one: whatever
overwrites the source, which may be evicted at any time, then comes later.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from exl2flow.engine.cache.prefix_tree import (
    ID_BYTES,
    FullPage,
    LowerTier,
    Page,
    PrefixTree,
    SequencePages,
    packed,
)
from exl2flow.kernels.interface.cache_formats import PAGE_TOKENS

LEAST_COPIED = 2  # tokens; nearly all prompts have the first one in common
WORTH_WAITING = 32  # tokens in common; to read fewer costs less than to wait for a pass


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows to copy from one page to another in every layer, the first `tokens` of each."""

    source: int
    target: int
    tokens: int


class PagePool:
    """Allocates pages, and finds cached pages for the beginning of a sequence.

    Ids are always those of one sequence, which only grows between cuts. Misuse fails an assertion.
    pages: content and users of each page. below: gets the full pages that are evicted.
    continues_from: whether a text can go on behind a full page of a key; None: anywhere.
    """

    def __init__(self, pages: int, *, page_tokens: int = PAGE_TOKENS) -> None:
        self.page_tokens = page_tokens
        self.pages = [Page() for _ in range(pages)]
        self._free = OrderedDict.fromkeys(range(pages))  # in the order of eviction
        self._listed = PrefixTree(self.pages, page_tokens)
        self.below: LowerTier | None = None
        self.continues_from: Callable[[bytes], bool] | None = None

    @property
    def free(self) -> int:
        """Number of pages without users, with or without content."""
        return len(self._free)

    def begin(self, salt: bytes = b"") -> SequencePages:
        """Return an empty sequence; sequences with different salts share nothing."""
        return SequencePages(salt)

    def match(self, held: SequencePages, ids: Sequence[int]) -> Copy | None:
        """Fill a sequence from the cache, up to its last id at most, from a page boundary only.

        It shares full pages, then copies the longest known beginning of the next one. Pages that
        were reserved but not written are given back first.
        """
        if not self.share(held, ids) or self.continues_from is not None:
            return None
        index = len(held.pages)
        end = min(held.filled + self.page_tokens, len(ids) - 1)
        source, tokens = self._listed.longest_match(
            self._key_before(held, index), packed(ids[held.filled : end])
        )
        if tokens < LEAST_COPIED or not self._free:
            return None
        held.filled += tokens
        held.cached += tokens
        return self._copy(held, source, tokens)

    def share(self, held: SequencePages, ids: Sequence[int]) -> bool:
        """Do the first part of `match`, full pages only; False: not at a page boundary."""
        first = self._boundary(held)
        if first is None:
            return False
        self._give_back(held, first)
        shared = self._shareable(held, ids, first)
        held.pages += [self._use(page) for page in shared]
        held.cached_pages += len(shared)
        held.cached += len(shared) * self.page_tokens
        held.filled += len(shared) * self.page_tokens
        return True

    def following(self, held: SequencePages, ids: Sequence[int]) -> Iterator[FullPage]:
        """Yield the full pages that a sequence needs next, up to its last id at most."""
        index = self._boundary(held)
        while index is not None and (end := (index + 1) * self.page_tokens) < len(ids):
            content = packed(ids[end - self.page_tokens : end])
            if index == len(held.keys):
                held.add_key(content)
            yield FullPage(held.keys[index], held.keys[index - 1] if index else held.root, content)
            index += 1

    def full(self) -> list[tuple[int, FullPage]]:
        """Return all full pages that are listed, the end of a sequence before its beginning."""
        listed = reversed(self._listed.full.items())
        return [(i, FullPage(k, self.pages[i].before, self.pages[i].content)) for k, i in listed]

    def needs(
        self, held: SequencePages, ids: Sequence[int], reusable: Sequence[int] | None = None
    ) -> int:
        """Return how many of the free pages `match` and `reserve` take for all ids.

        reusable: leading ids that `match` gets; None: all.
        """
        index, there = self._boundary(held), len(held.pages)
        if index is not None:
            shared = self._shareable(held, ids if reusable is None else reusable, index)
            there += sum(self.pages[page].users > 0 for page in shared)
        return max(0, -(-len(ids) // self.page_tokens) - there)

    def next_key(self, held: SequencePages, ids: Sequence[int]) -> tuple[bytes, bytes] | None:
        """Return a key of the tokens that prefill reads next, None if no others can use them.

        Let one of the sequences with equal keys read in a pass; after it, `match` gives the
        others `WORTH_WAITING` tokens or more.
        """
        index, end = self._boundary(held), held.filled + min(WORTH_WAITING, self.page_tokens)
        if self.continues_from is not None:  # all up to the last border, where a state is kept
            end = (len(ids) - 1) // self.page_tokens * self.page_tokens
        if index is None or not held.filled < end < len(ids):
            return None
        before = self._key_before(held, index)
        return None if before is None else (before, packed(ids[held.filled : end]))

    def reserve(self, held: SequencePages, tokens: int) -> bool:
        """Take pages for the first `tokens` positions, or none at all if too few are free."""
        assert not held.released, "the sequence has been released"
        missing = -(-tokens // self.page_tokens) - len(held.pages)
        if missing > self.free:
            return False
        held.pages += [self._take() for _ in range(missing)]
        return True

    def fill(self, held: SequencePages, ids: Sequence[int]) -> list[int]:
        """Record that keys and values of the next ids have been written.

        A page that becomes full is exchanged for one with equal content, if there is one.

        Returns:
            The indexes into `held.pages` that were exchanged.
        """
        assert held.filled + len(ids) <= len(held.pages) * self.page_tokens, "pages not reserved"
        exchanged, done = [], 0
        while done < len(ids):
            index, inside = divmod(held.filled, self.page_tokens)
            new = ids[done : done + self.page_tokens - inside]
            if self._fill_page(held, index, packed(new), is_fresh=not inside):
                exchanged.append(index)
            held.filled += len(new)
            done += len(new)
        return exchanged

    def cut(self, held: SequencePages, tokens: int) -> Copy | None:
        """Rewind to the first `tokens`, and free the pages after them, including reserved ones.

        If others use the last page, its first rows move to another one. If none is free, `filled`
        becomes the page's first position, and the tokens after it have to be computed again. So
        has a single token: `release` finds copies of its values by two ids.
        """
        assert 0 <= tokens <= held.filled, f"cannot rewind from {held.filled} to {tokens} tokens"
        tokens = 0 if tokens < LEAST_COPIED else tokens
        index, inside = divmod(tokens, self.page_tokens)
        self._give_back(held, index + (inside > 0))
        del held.keys[index:]
        held.filled = tokens
        if not inside:
            return None
        last = held.pages[index]
        if self.pages[last].users == 1:
            self._forget(self._listed.following(last))
            self._listed.put(last, self.pages[last].content[: inside * ID_BYTES])
            return None
        self._give_back(held, index)
        if self._free:
            return self._copy(held, last, inside)
        held.filled -= inside
        return None

    def release(self, held: SequencePages, *, keep: bool = True) -> None:
        """End a sequence. Its pages stay listed, unless their values are not finite (`keep=False`).

        Then forget all content that begins with the same two ids, and so includes copies of its
        pages, their sources, and what was computed from either; who uses such a page keeps it.
        """
        assert not held.released, "the sequence has been released"
        content, keys = b"", [*held.keys]
        if held.pages and not keep:
            content = self.pages[held.pages[0]].content
        if start := content[: LEAST_COPIED * ID_BYTES]:
            listed = self._listed.after[held.root]
            keys += self._forget([page for content, page in listed if content.startswith(start)])
        if self.below is not None and not keep:
            self.below.forget([*dict.fromkeys(keys)])
        self._give_back(held, 0)
        held.filled, held.released = 0, True

    def is_listed(self, key: bytes) -> bool:
        """Return whether there is a full page of a key."""
        return key in self._listed.full

    def clear(self) -> None:
        """Forget the content of all free pages."""
        self._forget(list(self._free))

    def _shareable(self, held: SequencePages, ids: Sequence[int], index: int) -> list[int]:
        """Return the cached pages from an index on that a sequence may take over."""
        pages = list[int]()
        while (page := self._listed.known(held, index + len(pages), ids)) is not None:
            pages.append(page)
        while pages and self.continues_from is not None:
            key = self.pages[pages[-1]].key
            if key is not None and self.continues_from(key):
                break
            pages.pop()
        return pages

    def _boundary(self, held: SequencePages) -> int | None:
        """Return the index of the next page; None inside a page, or behind forgotten ones."""
        assert not held.released, "the sequence has been released"
        index, inside = divmod(held.filled, self.page_tokens)
        return None if inside or self._key_before(held, index) is None else index

    def _key_before(self, held: SequencePages, index: int) -> bytes | None:
        """Return the key of the pages before an index, None if they are not listed."""
        return self.pages[held.pages[index - 1]].key if index else held.root

    def _copy(self, held: SequencePages, source: int, tokens: int) -> Copy | None:
        """Add a page that begins like the source; None if the source was evicted for it."""
        page = self.pages[source]
        before, content = page.before, page.content[: tokens * ID_BYTES]
        target = self._take()
        self.pages[target].before = before
        self._listed.put(target, content)
        held.pages.append(target)
        return Copy(source, target, tokens) if source != target else None

    def _fill_page(self, held: SequencePages, index: int, new: bytes, *, is_fresh: bool) -> bool:
        """Add ids to a page, and return whether it was exchanged for an equal one."""
        page_index = held.pages[index]
        page = self.pages[page_index]
        assert page.users == 1, f"page {page_index} is shared"
        before = self._key_before(held, index)
        if before is None or not (is_fresh or page.content):
            return False  # forgotten
        page.before = before
        self._listed.put(page_index, page.content + new)
        if len(page.content) < self.page_tokens * ID_BYTES:
            return False
        if index == len(held.keys):
            held.add_key(page.content)
        key = held.keys[index]
        if key in self._listed.full:
            self._listed.put(page_index, b"")
            self._drop(page_index)
            held.pages[index] = self._use(self._listed.full[key])
            return True
        page.key = key
        self._listed.full[key] = page_index
        return False

    def _use(self, index: int) -> int:
        self._free.pop(index, None)
        self.pages[index].users += 1
        return index

    def _drop(self, index: int) -> None:
        page = self.pages[index]
        page.users -= 1
        if not page.users:
            self._free[index] = None
            self._free.move_to_end(index, last=bool(page.content))

    def _give_back(self, held: SequencePages, index: int) -> None:
        """Drop the pages of a sequence from an index on, the last one first."""
        while len(held.pages) > index:
            self._drop(held.pages.pop())

    def _take(self) -> int:
        """Evict the page that has been free for longest."""
        index = next(iter(self._free))
        if self.below is not None and (key := self.pages[index].key) is not None:
            page = self.pages[index]
            self.below.take(index, FullPage(key, page.before, page.content))
        self._forget([index])
        return self._use(index)

    def _forget(self, pages: list[int]) -> list[bytes]:
        """Forget the content of pages and what follows them; return the keys of full ones."""
        keys = list[bytes]()
        while pages:
            index = pages.pop()
            if (key := self.pages[index].key) is not None:
                keys.append(key)
            pages += self._listed.following(index)
            self._listed.put(index, b"")
            if index in self._free:
                self._free.move_to_end(index, last=False)
        return keys
