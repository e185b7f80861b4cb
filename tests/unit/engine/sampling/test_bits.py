import numpy as np
import pytest
import torch

from exl2flow.engine.sampling.bits import all_but, ids_of, words_of
from exl2flow.kernels.reference.logits import contains, without


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_masks_have_the_ids_below_the_width(width: int) -> None:
    ids = {0, 5, 31, 32, 63, 64, 99, 100, 1000, -1}
    words = words_of(ids, width)

    inside = sorted(token for token in ids if 0 <= token < width)
    assert (words.dtype, words.shape) == (torch.int32, (-(-width // 32),))
    assert torch.arange(width)[~without(words[None], width)[0]].tolist() == inside
    assert contains(words[None], torch.tensor([inside]))[0].tolist() == [True] * len(inside)


def test_ids_may_come_in_any_form() -> None:
    ids = [3, 40, 3]

    assert torch.equal(words_of(iter(ids), 64), words_of(np.array(ids), 64))
    assert words_of((), 64).tolist() == [0, 0]
    assert words_of(range(31, 33), 64).tolist() == [-(2**31), 1]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_ids_come_out_of_a_mask_and_of_its_opposite(width: int) -> None:
    ids = [i for i in (0, 5, 31, 32, 63, 64, 99) if i < width]

    assert ids_of(words_of(ids, width)) == ids
    others = ids_of(all_but(frozenset(ids), width))
    assert [i for i in others if i < width] == sorted({*range(width)} - {*ids})
