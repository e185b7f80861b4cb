"""Sums over rows do not depend on how many ranks share them."""

import pytest
import torch
from together import on_all

from exl2flow.core.runtime.ranks import ALONE, WorkRanks
from exl2flow.quant.walk.deal import Deal, MatrixSum, NamedSums, Pairs, PieceSums

K = 5


def summed(ranks: WorkRanks, x: torch.Tensor, to: int = 0) -> dict[str, torch.Tensor]:
    deal = Deal(len(x), ranks)
    own = x[deal.own.start : deal.own.stop]
    sums = PieceSums(deal, NamedSums(a=MatrixSum(K), b=MatrixSum(K)))
    for number, piece in enumerate(deal.pieces):
        for row in own[piece]:
            sums.at(number)["a"].matrix.addmm_(row.T, row)
            sums.at(number)["b"].matrix.sub_(row.T @ row)
    found = sums.total(lambda name: to if name == "a" else 0)
    return {name: total.matrix for name, total in found.items()}


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("count", [2, 3])
def test_sums_have_the_bits_of_one_rank(rows: int, count: int) -> None:
    x = torch.randn(rows, 9, K) * 100
    alone = summed(ALONE, x)

    found = on_all(count, lambda ranks: summed(ranks, x, to=count - 1))

    assert found[-1]["a"].equal(alone["a"])
    assert found[0]["b"].equal(alone["b"])
    assert "b" not in found[-1]
    assert torch.allclose(alone["a"], x.flatten(0, 1).T @ x.flatten(0, 1), rtol=1e-4, atol=1)


def test_rows_in_one_piece_are_added_one_after_the_other() -> None:
    x = torch.randn(9, 2, K)
    deal = Deal(9, is_whole=True)
    sums = PieceSums(deal, NamedSums(a=MatrixSum(K)))
    total = torch.zeros(K, K)
    for row in x:
        sums.at(0)["a"].matrix.addmm_(row.T, row)
        total.addmm_(row.T, row)

    assert deal.pieces == [slice(0, 9)]
    assert sums.total()["a"].matrix.equal(total)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "step"), [(9, 1), (9, 2), (10, 3), (3, 2), (100, 3)])
def test_each_pair_is_at_the_rank_of_its_row(rows: int, step: int, count: int) -> None:
    whole = torch.arange(rows)
    deals = [Deal(rows, WorkRanks(rank, count)) for rank in range(count)]
    pairs = [Pairs(range(0, rows, step), deal) for deal in deals]
    own = [whole[deal.own.start : deal.own.stop] for deal in deals]
    here = [pair.of(x) for pair, x in zip(pairs, own, strict=True)]

    assert [row for pair in pairs for row in pair.own] == list(range(0, rows, step))
    assert [x.tolist() for x in here] == [pair.own for pair in pairs]
    assert [pair.first for pair in pairs] == [
        sum(len(p.own) for p in pairs[:rank]) for rank in range(count)
    ]
    every = torch.cat([pair.every(x, 4) for pair, x in zip(pairs, here, strict=True)])
    assert every.tolist() == list(range(0, rows, step))[::4]


def test_nothing_is_paired_without_pairs() -> None:
    pairs = Pairs(range(0), Deal(5))

    assert pairs.own == []
    assert pairs.of(torch.zeros(5, 2)).shape == (0, 2)
