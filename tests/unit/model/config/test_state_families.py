"""Families with a state against transformers: beyond a chunk and a page, by steps, cut anywhere."""

from typing import Any

import pytest
import torch
from bounds import near_logits
from caches import Sequences
from checkpoints import make_checkpoint, reference_model
from decoders import build_decoder
from tiny import VOCAB_SIZE

from exl2flow.model import CanonicalTensors, Decoder, resolve

# experts, packed states and not; wrappers and other rows compute the same between these
FAMILIES = ("qwen3.5-text", "qwen3-next")
LENGTHS = (64, 80, 300)
STEPS = 6  # behind a prompt
NEAR_TAPS, NEAR_CHUNKS, NEAR_PAGE = (2, 3, 4, 5, 31), (63, 64, 65, 128, 192), (255, 256, 257)
CLOSE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Decoder]:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    spec = resolve(folder)
    ours = build_decoder(spec, CanonicalTensors(spec), dtype=torch.float32, device="cpu")
    return reference_model(request.param, folder), ours


def texts(count: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB_SIZE, (count, length), generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_several_texts_agree_whole_and_step_by_step(both: tuple[Any, Decoder], length: int) -> None:
    reference, ours = both
    ids = texts(2, length)
    expected = reference(ids).logits
    bound = near_logits(expected, ours.spec, length)

    torch.testing.assert_close(ours.forward(ids), expected, **bound)

    cache = Sequences(ours.spec, batch=2, tokens=length)
    first = cache.read(ours.forward, ids[:, : length - STEPS])
    steps = [cache.read(ours.forward, ids[:, at : at + 1]) for at in range(length - STEPS, length)]
    torch.testing.assert_close(torch.cat([first, *steps], dim=1), expected, **bound)


@torch.no_grad()
def test_a_prompt_may_be_cut_anywhere(both: tuple[Any, Decoder]) -> None:
    _, ours = both
    ids = texts(1, 300)
    expected = ours.forward(ids)
    for cut in (*NEAR_TAPS, *NEAR_CHUNKS, *NEAR_PAGE):
        cache = Sequences(ours.spec, tokens=300)

        parts = [cache.read(ours.forward, part) for part in (ids[:, :cut], ids[:, cut:])]

        torch.testing.assert_close(torch.cat(parts, dim=1), expected, **CLOSE)


@torch.no_grad()
def test_cuts_at_multiples_of_a_chunk_change_no_bit_of_a_state(both: tuple[Any, Decoder]) -> None:
    _, ours = both
    ids, found = texts(1, 300), list[torch.Tensor]()
    for cuts in ((), (64,), (64, 128, 256), (192,)):
        cache = Sequences(ours.spec, tokens=300)
        for begin, end in zip((0, *cuts), (*cuts, 300), strict=True):
            cache.read(ours.hidden, ids[:, begin:end])
        assert cache.cache.states is not None
        found.append(cache.cache.states.layer(0).state[0])

    assert all(torch.equal(state, found[0]) for state in found)
