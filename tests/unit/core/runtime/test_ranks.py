"""Ranks exchange tensors and words, and divide work the same way in every process."""

from itertools import pairwise

import pytest
import torch
from together import on_all

from exl2flow.core.runtime.ranks import ALONE, PIECES, WorkRanks, pieces


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 16, 100, 115])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_row_is_in_one_piece_and_every_piece_at_one_rank(rows: int, count: int) -> None:
    dealt = [piece for rank in range(count) for piece in WorkRanks(rank, count).own(rows)]

    assert dealt == pieces(rows)
    assert [row for piece in dealt for row in piece] == list(range(rows))
    assert len(dealt) == min(rows, PIECES)
    sizes = [len(piece) for piece in dealt]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_rows_of_ranks_are_about_equal() -> None:
    sizes = [sum(map(len, WorkRanks(rank, 2).own(100))) for rank in range(2)]

    assert sizes == [50, 50]


def test_work_is_dealt_by_cost_the_same_way_at_all_ranks() -> None:
    costs = [8.0, 1.0, 4.0, 4.0, 7.0, 8.0]

    owners = [WorkRanks(rank, 2).owners(costs) for rank in range(2)]

    assert owners[0] == owners[1]
    loads = [0.0, 0.0]
    for cost, owner in zip(costs, owners[0], strict=True):
        loads[owner] += cost
    assert loads == [16.0, 16.0]
    assert ALONE.owners(costs) == [0] * 6


@pytest.mark.parametrize("to", [0, 1])
def test_a_total_is_added_in_the_order_of_ranks_and_parts(to: int) -> None:
    parts = [torch.tensor([x]) for x in (1e8, 3.0, 3.0, -1e8)]  # any other order differs
    shares = [parts[:1], parts[1:]]

    found = on_all(
        2,
        lambda ranks: ranks.total([p.clone() for p in shares[ranks.rank]], [1, 3], parts[0], to),
    )

    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert found[1 - to] is None
    assert found[to] is not None
    assert found[to].equal(expected)
    assert float(expected) == 0.0


def test_rows_are_gathered_at_rank_0_in_their_places() -> None:
    x = torch.arange(12.0).view(6, 2)
    places = [[0, 4], [1, 2, 3, 5]]

    by_place, in_order = (
        on_all(2, lambda ranks: ranks.gather(x[places[ranks.rank]], places[ranks.rank])),
        on_all(2, lambda ranks: ranks.gather(x[:1] if ranks.rank else x[1:])),
    )

    assert by_place[0] is not None
    assert by_place[0].equal(x)
    assert in_order[0] is not None
    assert in_order[0].equal(torch.cat([x[1:], x[:1]]))
    assert by_place[1] is in_order[1] is None


def test_tensors_of_a_rank_reach_all_or_one() -> None:
    tensors = {
        "half": torch.rand(3, 5).half(),
        "codes": torch.randint(0, 255, (7,), dtype=torch.uint8),
        "turned": torch.rand(4, 6).T,  # not contiguous
        "none": torch.empty(0, 4),
    }

    def bring(ranks: WorkRanks) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        own = tensors if ranks.rank == 1 else None
        return ranks.bring(own, 1), ranks.bring(own, 1, to=0)

    found = on_all(3, bring)

    for everywhere, _ in found:
        assert everywhere.keys() == tensors.keys()
        for name, x in tensors.items():
            assert everywhere[name].dtype == x.dtype
            assert everywhere[name].equal(x)
    assert all(found[0][1][name].equal(x) for name, x in tensors.items())
    assert found[2][1] == {}


def test_words_reach_all() -> None:
    found = on_all(3, lambda r: (r.told({"rank": r.rank}, 2), r.told_by_all(r.rank * "x")))

    assert found == [({"rank": 2}, ["", "x", "xx"])] * 3


def test_alone_nothing_is_exchanged() -> None:
    x = torch.rand(2, 3)

    assert ALONE.told("words") == "words"
    assert ALONE.told_by_all(1) == [1]
    assert ALONE.bring({"x": x}, 0)["x"] is x
    gathered = ALONE.gather(x)
    assert gathered is not None
    assert gathered.equal(x)
    assert all(a.stop == b.start for a, b in pairwise(ALONE.own(9)))
