"""Combinations in which all values of two axes meet."""

from itertools import combinations, product

from pairs import pairs_of


def test_every_two_values_meet() -> None:
    axes = ("abcdefg", range(9), [None, True, 2.5])

    found = pairs_of(*axes)

    for a, b in combinations(range(3), 2):
        assert {(one[a], one[b]) for one in found} == set(product(axes[a], axes[b]))
    assert len(found) < 80
