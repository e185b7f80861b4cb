"""The rows of each step."""

from exl2flow.quant.training.row_order import RowOrder


def test_rows_follow_from_the_step_alone() -> None:
    all_rows = [range(5)]
    first, again = ([RowOrder(all_rows, 2, seed=s)(i) for i in range(5)] for s in (3, 3))
    other = [RowOrder(all_rows, 2, seed=4)(i) for i in range(5)]

    assert first == again != other
    taken = [row for step in first for row in step]
    assert sorted(taken) == sorted([*range(5)] * 2)
    assert sorted(taken[:5]) == [*range(5)]  # all of them before any comes again
    assert sorted(RowOrder([range(3)], 8, seed=0)(1)) == [0, 1, 2]  # no row twice in a step


def test_each_step_takes_rows_of_all_pieces() -> None:
    parts = [range(3), range(3, 7), range(7, 10), range(10, 14)]
    order = RowOrder(parts, 4, seed=0)

    steps = [order(step) for step in range(7)]

    taken = [row for step in steps for row in step]
    assert sorted(taken[:14]) == sorted(taken[14:]) == [*range(14)]
    for step in steps[:3]:
        assert {place for row in step for place, p in enumerate(parts) if row in p} == {0, 1, 2, 3}
    half = RowOrder(parts, 2, seed=0)  # of rows 0 to 6 and of those behind them, one each
    assert all(sum(row < 7 for row in half(step)) == 1 for step in range(7))
