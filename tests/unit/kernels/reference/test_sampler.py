"""Steps of the sampler whose result depends on equal numbers or on their order."""

import pytest
import torch

from exl2flow.kernels.reference.sampler import drop_tail, keep_typical, rank, spare_unlikely

TWO_ZEROS = torch.tensor([[0.0, -0.0, 1.0, -1.0, 0.0, 1.0, -0.0, -2.0, -3.0, -4.0, -5.0, -6.0]])


def weights(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def bound(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@pytest.mark.parametrize("most", [3, 12, None])
def test_equal_logits_are_ranked_by_id(most: int | None) -> None:
    ids, ordered = rank(TWO_ZEROS, most)

    assert ids[0].tolist() == [2, 5, 0, 1, 4, 6, 3, 7, 8, 9, 10, 11][:most]
    assert torch.equal(ordered, TWO_ZEROS.gather(1, ids))


def test_of_equal_distances_to_the_entropy_the_likelier_token_is_nearer() -> None:
    """The entropy is that of 1/4: 1/2 and 1/8 are equally far."""
    x = weights(1 / 2, 1 / 8, 1 / 8, 1 / 8, 1 / 8)

    for share, kept in ((0.1, 1), (0.5, 1), (0.51, 2), (0.7, 3), (0.99, 5)):
        assert (keep_typical(x, bound(share)) > 0).sum() == kept
        assert (keep_typical(x, bound(share))[0, :kept] > 0).all()


def test_of_equally_likely_tokens_the_first_are_typical() -> None:
    found = keep_typical(torch.ones(1, 1000, dtype=torch.float64), bound(0.25))

    assert found[0].nonzero()[:, 0].tolist() == list(range(250))


def test_tail_free_sampling_needs_three_candidates() -> None:
    x, kept = weights(1.0, 0.5, 0.2, 0.1), torch.tensor([[2]])

    assert drop_tail(x, kept, bound(0.1)).tolist() == [[2]]
    assert drop_tail(x[:, :2], kept, bound(0.1)).tolist() == [[2]]
    assert drop_tail(x, kept + 2, bound(0.1)).tolist() == [[1]]
    assert drop_tail(x, kept + 2, bound(float("inf"))).tolist() == [[4]]


def test_a_single_likely_token_loses_nothing() -> None:
    numbers = {"xtc_threshold": bound(0.3), "xtc_probability": bound(1.0)}
    x = weights(0.6, 0.25, 0.15)

    assert torch.equal(spare_unlikely(x, torch.zeros(1, 3, dtype=torch.bool), numbers), x)
