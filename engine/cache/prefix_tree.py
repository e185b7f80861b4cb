"""Prefix tree of cached pages: finds pages by the hash of everything before them. No tensors."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack
from typing import NamedTuple, Protocol

ID_BYTES = 8


@dataclass(slots=True, weakref_slot=True, eq=False)
class SequencePages:
    """Pages of one sequence, whose first `filled` tokens are stored; a `PagePool` changes it.

    The last three are those of `SequenceStates`, for layers with a state.
    """

    root: bytes  # stands for the key before the first page
    pages: list[int] = field(default_factory=list)
    filled: int = 0
    cached: int = 0  # tokens that were shared or copied instead of computed
    cached_pages: int = 0  # pages that were shared
    loaded: Counter[str] = field(default_factory=Counter)  # cached tokens by lower tier
    keys: list[bytes] = field(default_factory=list)  # perhaps of pages that are not filled yet
    released: bool = False
    behind: int = 0  # tokens that the state includes, at most
    snapshot: int = 0  # the last page border whose state was kept
    waits_at: int | None = None  # tokens of the state that stands where text is held back

    def add_key(self, content: bytes) -> None:
        """Add the key of the next full page: BLAKE2b of the key before it and its ids."""
        before = self.keys[-1] if self.keys else self.root
        self.keys.append(blake2b(before + content, digest_size=16).digest())


@dataclass(slots=True)
class Page:
    """Users and content of a page; only a `PagePool` changes it."""

    users: int = 0
    before: bytes = b""  # key of the pages before it
    content: bytes = b""  # its ids; empty if it is not listed
    key: bytes | None = None  # if it is full and listed

    @property
    def ids(self) -> list[int]:
        """The ids whose keys and values it holds and other sequences may use."""
        return [*memoryview(self.content).cast("q")]


class FullPage(NamedTuple):
    """Identity of a full page: its key, the key of the pages before it, and its ids."""

    key: bytes
    before: bytes
    content: bytes


class LowerTier(Protocol):
    """Gets the pages that leave a pool."""

    def take(self, index: int, page: FullPage) -> None:
        """Copy page `index` at once, before the caller overwrites it."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget pages whose values may not be finite."""


class PrefixTree:
    """The listed pages of a pool, by key and by the key before them."""

    def __init__(self, pages: list[Page], page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages = pages
        self.full: dict[bytes, int] = {}  # key → page
        self.after: dict[bytes, list[tuple[bytes, int]]] = {}  # key → (content, page), sorted

    def known(self, held: SequencePages, index: int, ids: Sequence[int]) -> int | None:
        """Return the cached page for the ids of page `index`, if there is one and ids follow."""
        end = (index + 1) * self.page_tokens
        if end >= len(ids):
            return None
        if index == len(held.keys):
            held.add_key(packed(ids[end - self.page_tokens : end]))
        return self.full.get(held.keys[index])

    def longest_match(self, before: bytes | None, wanted: bytes) -> tuple[int, int]:
        """Return the page with the longest common prefix, and the prefix's number of tokens."""
        listed = self.after.get(before or b"", [])
        place = bisect_left(listed, (wanted,))  # the longest one is next to it
        near = listed[max(0, place - 1) : place + 1]
        tokens, page = max(
            ((common_ids(wanted, content), page) for content, page in near), default=(0, 0)
        )
        return page, tokens

    def following(self, index: int) -> list[int]:
        """Return the pages that are listed directly after a full one."""
        key = self.pages[index].key
        return [] if key is None else [page for _, page in self.after.get(key, ())]

    def put(self, index: int, content: bytes) -> None:
        """List a page with new content and without a key, or remove it if that is empty."""
        page = self.pages[index]
        if page.key is not None:
            del self.full[page.key]
            page.key = None
        if page.content:
            listed = self.after[page.before]
            del listed[bisect_left(listed, (page.content, index))]
            if not listed:
                del self.after[page.before]
        page.content = content
        if content:
            insort(self.after.setdefault(page.before, []), (content, index))


def packed(ids: Sequence[int]) -> bytes:
    """Return ids as little-endian int64."""
    return pack(f"<{len(ids)}q", *ids)


def common_ids(a: bytes, b: bytes) -> int:
    """Return how many leading ids are equal: those below the lowest bit that differs."""
    length = min(len(a), len(b))
    differing = int.from_bytes(a[:length], "little") ^ int.from_bytes(b[:length], "little")
    lowest = (differing & -differing).bit_length() - 1 if differing else 8 * length
    return lowest // (8 * ID_BYTES)
