"""The rows of each step."""

from exl2flow.quant.training.row_order import RowOrder


def test_rows_follow_from_the_step_alone() -> None:
    first, again = ([RowOrder(5, 2, seed=s)(i) for i in range(5)] for s in (3, 3))
    other = [RowOrder(5, 2, seed=4)(i) for i in range(5)]

    assert first == again != other
    taken = [row for step in first for row in step]
    assert sorted(taken) == sorted([*range(5)] * 2)
    assert sorted(taken[:5]) == [*range(5)]  # all of them before any comes again
    assert sorted(RowOrder(3, 8, seed=0)(1)) == [0, 1, 2]  # no row twice in a step
