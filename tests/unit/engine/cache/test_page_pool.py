"""What sequences share, copy and give back."""

from collections.abc import Sequence

import pytest

from exl2flow.engine.cache import prefix_tree as listing
from exl2flow.engine.cache.page_pool import WORTH_WAITING, Copy, PagePool
from exl2flow.engine.cache.prefix_tree import FullPage, SequencePages, packed
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


def test_only_what_begins_with_the_same_ids_is_forgotten() -> None:
    table = PagePool(4, page_tokens=4)
    for held in (read(table, [7, 8, 9, 10, 11]), read(table, IDS[:4])):
        table.release(held)
    table.release(read(table, [*IDS[:3], 7]), keep=False)

    read(table, range(1, 13))  # takes the two that were forgotten, and the end of the first

    again = table.begin()
    table.match(again, [7, 8, 9, 10, 11])
    assert again.filled == 4


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


@pytest.mark.parametrize(("length", "pages"), [(13, 3), (12, 2), (9, 2), (4, 0), (1, 0)])
@pytest.mark.parametrize("salt", [b"", b"adapter"])
def test_the_pages_that_a_sequence_needs_are_those_that_another_has_read(
    salt: bytes, length: int, pages: int
) -> None:
    table = PagePool(8, page_tokens=4)
    read(table, IDS[:14], table.begin(salt))
    known = [page for _, page in reversed(table.full())]

    needed = [*table.following(table.begin(salt), IDS[:length])]

    assert needed == known[:pages]
    assert [page.content for page in known] == [packed(IDS[i : i + 4]) for i in (0, 4, 8)]


def test_a_sequence_needs_the_pages_behind_those_it_has() -> None:
    table = PagePool(8, page_tokens=4)
    first = read(table, IDS[:8])
    second = read(table, IDS[:6])

    assert [page.before for page in table.following(first, IDS[:13])] == [first.keys[1]]
    assert [*table.following(second, IDS[:13])] == []  # it stands inside a page


def test_nothing_is_taken_over_inside_a_page() -> None:
    table = PagePool(8, page_tokens=4)
    read(table, IDS[2:8])  # as if the text began here
    held = read(table, IDS[:2])

    assert not table.share(held, IDS[:9])
    assert table.match(held, IDS[:9]) is None
    assert (held.filled, held.cached) == (2, 0)


@pytest.mark.parametrize(("kept", "pages"), [([0, 1], 2), ([0], 1), ([2], 3), ([], 0)])
def test_pages_are_shared_up_to_the_last_one_whose_state_is_kept(
    kept: list[int], pages: int
) -> None:
    table = PagePool(8, page_tokens=4)
    keys = read(table, IDS[:14]).keys
    table.continues_from = {keys[index] for index in kept}.__contains__
    held = table.begin()

    assert table.match(held, IDS[:14]) is None  # no copy: a state belongs to a border

    assert (held.filled, held.cached, held.cached_pages) == (4 * pages, 4 * pages, pages)
    assert table.needs(table.begin(), IDS[:14]) == 4 - pages


@pytest.mark.parametrize(
    ("length", "end"), [(1, None), (4, None), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8)]
)
def test_with_states_equal_texts_wait_for_all_up_to_the_last_border(
    length: int, end: int | None
) -> None:
    table = PagePool(8, page_tokens=4)
    table.continues_from = lambda key: False
    held = table.begin()

    key = table.next_key(held, IDS[:length])

    assert key == (None if end is None else (held.root, packed(IDS[:end])))


@pytest.mark.parametrize(("tokens", "waits"), [(4, 4), (128, WORTH_WAITING)])
def test_without_states_equal_texts_wait_for_a_page_or_what_is_worth_it(
    tokens: int, waits: int
) -> None:
    table = PagePool(8, page_tokens=tokens)
    held = table.begin()

    assert table.next_key(held, IDS[:waits]) is None
    assert table.next_key(held, IDS[: waits + 1]) == (held.root, packed(IDS[:waits]))


def test_nobody_waits_for_what_stands_behind_forgotten_pages() -> None:
    table = PagePool(8, page_tokens=4)
    held = read(table, IDS[:4])
    assert table.next_key(held, IDS[:9]) == (held.keys[0], packed(IDS[4:8]))
    table.release(read(table, [*IDS[:4]]), keep=False)  # forgets the page of both

    assert table.next_key(held, IDS[:9]) is None


def test_a_page_is_listed_until_it_is_evicted() -> None:
    table = PagePool(2, page_tokens=4)
    held = read(table, IDS[:6])
    [key] = held.keys
    assert table.is_listed(key)
    assert not table.is_listed(held.root)
    table.release(held)
    assert (held.filled, held.pages, table.is_listed(key)) == (0, [], True)

    read(table, IDS[20:28])

    assert not table.is_listed(key)


class Below:
    """What a pool hands to a lower tier."""

    def __init__(self) -> None:
        self.taken, self.forgotten = list[FullPage](), list[bytes]()

    def take(self, index: int, page: FullPage) -> None:
        self.taken.append(page)

    def forget(self, keys: Sequence[bytes]) -> None:
        self.forgotten += keys


def test_full_pages_that_are_evicted_go_to_the_tier_below() -> None:
    table, below = PagePool(3, page_tokens=4), Below()
    table.below = below
    held = read(table, IDS[:10])
    full = [page for _, page in table.full()]  # the end before the beginning
    table.release(held)
    assert below.taken == []

    read(table, IDS[20:31])

    assert below.taken == full
    assert below.forgotten == []


def test_values_that_are_not_finite_are_forgotten_below_too_and_all_that_follow() -> None:
    table, below = PagePool(6, page_tokens=4), Below()
    table.below = below
    other = read(table, [*IDS[:8], *IDS[20:26]])
    keys = [*other.keys]
    table.release(other)
    held = read(table, IDS[:10])

    table.release(held, keep=False)

    assert {*below.forgotten} >= {*keys}
    assert len(below.forgotten) == len({*below.forgotten})
    assert table.full() == []
