"""Where rows begin in a stream: one after the other, at articles, or evenly spread."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2flow.quant.tokenize.cutting import Stream, cut, overlaps, row_offsets, shuffled


def numbered(count: int, starts: list[int] | None = None) -> Stream:
    return Stream(list(range(count)), starts or [])


def test_rows_follow_one_another_while_the_text_lasts() -> None:
    assert row_offsets(numbered(100), 3, 32) == [0, 32, 64]


def test_short_text_gives_evenly_spread_rows_from_the_first_token_to_the_last() -> None:
    offsets = row_offsets(numbered(132), 5, 32)

    assert offsets == [0, 25, 50, 75, 100]
    assert overlaps(offsets, 32)


def test_each_row_begins_with_an_article_no_earlier_row_has_reached() -> None:
    stream = numbered(300, [1, 20, 50, 90, 200, 280])

    assert row_offsets(stream, 3, 64) == [1, 90, 200]


def test_short_articles_are_met_at_their_start_where_one_is_near() -> None:
    stream = numbered(132, [1, 47, 48, 93])

    assert row_offsets(stream, 5, 32) == [1, 25, 48, 75, 93]


def test_article_starts_do_not_make_rows_overlap_that_need_not() -> None:
    stream = numbered(400, [0, 90, 130, 150, 170, 266])

    offsets = row_offsets(stream, 7, 40)

    assert offsets == [0, 60, 120, 180, 240, 300, 360]
    assert not overlaps(offsets, 40)


def test_second_half_of_article_rows_begins_with_bos() -> None:
    rows = cut(numbered(100, [0]), [3, 10, 20], 4, bos=777)

    assert rows.tolist() == [[3, 4, 5, 6], [777, 10, 11, 12], [777, 20, 21, 22]]


def test_plain_text_and_tokenizers_without_bos_get_none() -> None:
    plain = cut(numbered(100), [3, 10], 2, bos=777)
    articles = cut(numbered(100, [0]), [3, 10], 2, bos=None)

    assert plain.tolist() == articles.tolist() == [[3, 4], [10, 11]]


def test_shuffled_rows_are_pieces_of_the_text() -> None:
    rows = shuffled(range(1000), 4, 320, torch.Generator().manual_seed(0))

    assert rows.shape == (4, 320)
    for piece in (rows[:, :128], rows[:, 128:256], rows[:, 256:]):
        assert torch.equal(piece, piece[:, :1] + torch.arange(piece.shape[1]))
    assert rows[:, 0].unique().numel() > 1


def test_shuffled_rows_may_be_shorter_than_a_piece() -> None:
    rows = shuffled(range(32), 2, 32, torch.Generator().manual_seed(0))

    assert rows.tolist() == [list(range(32))] * 2


@given(
    total=st.integers(32, 400),
    count=st.integers(1, 60),
    starts=st.lists(st.integers(0, 399), max_size=12, unique=True).map(sorted),
)
def test_offsets_fit_rise_and_differ_where_they_can(
    total: int, count: int, starts: list[int]
) -> None:
    stream = numbered(total, [start for start in starts if start < total])

    offsets = row_offsets(stream, count, 32)

    assert len(offsets) == count
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= total - 32 for offset in offsets)
    assert len(set(offsets)) == min(count, total - 31)
