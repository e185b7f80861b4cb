"""What sequences share, copy and give back."""

from collections.abc import Sequence

import pytest

from exl2flow.inference.cache import prefix_tree as listing
from exl2flow.inference.cache.page_pool import Copy, PagePool
from exl2flow.inference.cache.prefix_tree import SequencePages
from exl2flow.kernels import PAGE_TOKENS

IDS = list(range(100, 150))


def read(table: PagePool, ids: Sequence[int], held: SequencePages | None = None) -> SequencePages:
    """Write all ids after those that are filled."""
    held = held or table.begin()
    assert table.reserve(held, len(ids))
    table.fill(held, ids[held.filled :])
    return held


def test_a_second_sequence_shares_full_pages_and_copies_the_rest() -> None:
    table = PagePool(8, page_tokens=4)
    first = read(table, IDS[:11])
    second = table.begin()

    copy = table.match(second, [*IDS[:10], 7, 8])

    assert copy == Copy(source=first.pages[2], target=second.pages[2], tokens=2)
    assert second.pages[:2] == first.pages[:2]
    assert (second.filled, second.cached, second.cached_pages) == (10, 10, 2)
    assert table.free == 8 - 4


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    table = PagePool(8, page_tokens=4)
    read(table, IDS[:8])
    again = table.begin()

    copy = table.match(again, IDS[:8])

    assert again.filled == 7
    assert copy is not None
    assert copy.tokens == 3


def test_a_page_that_becomes_equal_to_another_is_exchanged_for_it() -> None:
    table = PagePool(8, page_tokens=4)
    first, second = table.begin(), table.begin()
    for held in (first, second):
        table.reserve(held, 8)
    table.fill(first, IDS[:6])

    assert table.fill(second, IDS[:6]) == [0]
    assert second.pages[0] == first.pages[0]
    assert table.free == 8 - 3


def test_rewinding_moves_away_from_a_page_that_others_use() -> None:
    table = PagePool(8, page_tokens=4)
    first = read(table, IDS[:8])
    second = table.begin()
    table.match(second, IDS[:9])

    copy = table.cut(second, 6)

    assert copy == Copy(source=first.pages[1], target=second.pages[1], tokens=2)
    assert second.filled == 6


def test_rewinding_without_a_free_page_falls_to_the_beginning_of_the_page() -> None:
    table = PagePool(2, page_tokens=4)
    read(table, IDS[:8])
    second = table.begin()
    table.match(second, IDS[:9])

    assert table.cut(second, 6) is None
    assert (second.filled, len(second.pages)) == (4, 1)


def test_a_rewound_page_is_not_shared_under_its_old_content() -> None:
    table = PagePool(8, page_tokens=4)
    held = read(table, IDS[:8])

    assert table.cut(held, 6) is None

    table.fill(held, [1, 2])
    other = table.begin()
    table.match(other, IDS[:9])
    assert (other.filled, other.cached_pages) == (6, 1)


def test_too_few_pages_take_none() -> None:
    table = PagePool(3, page_tokens=4)
    held = read(table, IDS[:4])

    assert not table.reserve(held, 13)
    assert (len(held.pages), table.free) == (1, 2)


def test_the_end_of_the_oldest_sequence_is_evicted_first() -> None:
    table = PagePool(4, page_tokens=4)
    old, new = read(table, IDS[:8]), read(table, IDS[20:28])
    end = old.pages[1]
    table.release(old)
    table.release(new)

    third = read(table, [1, 2, 3])

    assert third.pages == [end]


def test_content_that_was_forgotten_is_not_found_even_in_use() -> None:
    table = PagePool(8, page_tokens=4)
    first = read(table, IDS[:9])
    second = table.begin()
    table.match(second, IDS[:9])
    table.release(first, keep=False)
    third = table.begin()

    table.match(third, IDS[:9])

    assert third.filled == 0
    assert second.filled == 8
    read(table, IDS[:13], second)  # it goes on, but what it writes depends on forgotten pages
    table.match(third, IDS[:13])
    assert third.filled == 0


def test_sequences_with_different_salts_share_nothing() -> None:
    table = PagePool(8, page_tokens=4)
    read(table, IDS[:9])
    other = table.begin(b"adapter")

    assert table.match(other, IDS[:9]) is None
    assert other.filled == 0


def test_needs_counts_free_pages_even_when_cached() -> None:
    table = PagePool(8, page_tokens=4)
    held = read(table, IDS[:8])

    assert table.needs(table.begin(), IDS[:10]) == 1
    assert table.needs(table.begin(), IDS[:10], IDS[:5]) == 2  # so few may be shared
    assert table.needs(table.begin(), IDS[:10], IDS[:1]) == 3
    table.release(held)
    assert table.needs(table.begin(), IDS[:10]) == 3


def test_equal_prompts_have_one_next_key_until_one_has_been_read() -> None:
    table = PagePool(8, page_tokens=4)
    first, second, other = table.begin(), table.begin(), table.begin()

    key = table.next_key(first, IDS[:9])
    assert key is not None
    assert table.next_key(second, IDS[:9]) == key
    assert table.next_key(other, IDS[1:10]) != key
    assert table.next_key(other, IDS[:4]) is None  # too short to wait for

    read(table, IDS[:8], first)
    table.match(second, IDS[:9])
    assert second.filled == 8


def test_cleared_pages_keep_only_what_is_in_use() -> None:
    table = PagePool(8, page_tokens=4)
    used, ended = read(table, IDS[:5]), read(table, IDS[20:29])
    table.release(ended)

    table.clear()

    found, lost = table.begin(), table.begin()
    table.match(found, IDS[:6])
    table.match(lost, IDS[20:29])
    assert (found.pages[0], found.filled, lost.filled) == (used.pages[0], 4, 0)


def test_every_page_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    original = listing.blake2b

    def counted(data: bytes, *, digest_size: int) -> object:
        hashed.append(len(data))
        return original(data, digest_size=digest_size)

    monkeypatch.setattr(listing, "blake2b", counted)
    ids = list(range(32768))
    table = PagePool(300)
    first, second = table.begin(), table.begin()

    table.match(first, ids)
    table.match(first, ids)
    assert len(hashed) == 1  # nothing is known: the first page tells
    read(table, ids, first)
    assert len(hashed) == 32768 // PAGE_TOKENS

    table.needs(second, ids)
    table.match(second, ids)
    table.match(second, ids)
    assert second.filled == len(ids) - 1
    assert len(hashed) == 2 * 32768 // PAGE_TOKENS - 1


def test_misuse_is_noticed() -> None:
    table = PagePool(8, page_tokens=4)
    held = read(table, IDS[:4])

    with pytest.raises(AssertionError, match="not reserved"):
        table.fill(held, [1])
    with pytest.raises(AssertionError, match="cannot rewind from 4 to 5"):
        table.cut(held, 5)
    table.release(held)
    with pytest.raises(AssertionError, match="released"):
        table.release(held)


def test_pages_that_were_reserved_and_others_that_are_shared_are_both_there() -> None:
    table = PagePool(8, page_tokens=4)
    reserved, reader = table.begin(), table.begin()
    assert table.reserve(reserved, 1)
    read(table, IDS[:8], reader)

    needed, free = table.needs(reserved, IDS[:12]), table.free
    table.match(reserved, IDS[:12])
    assert table.reserve(reserved, 12)

    assert reserved.pages[:2] == reader.pages
    assert needed == free - table.free == 0


def test_a_rewind_to_one_token_gives_it_up() -> None:
    """Its page has too few ids to be found among the copies of a sequence that fails."""
    table = PagePool(8, page_tokens=4)
    first = read(table, IDS[:2])
    copied = table.begin()
    table.match(copied, IDS[:3])

    assert table.cut(first, 1) is None

    assert (first.filled, first.pages) == (0, [])
    table.release(copied, keep=False)
    assert not any(page.content for page in table.pages)
