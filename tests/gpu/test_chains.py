"""Few tokens through the chains of every kind of family on a GPU, as on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from caches import Sequences
from packed_models import LINKS, decoder_of, make_packed
from tiny import VOCAB_SIZE

pytestmark = pytest.mark.gpu

DEVICES = ("cuda", "cpu")


@pytest.mark.parametrize("family", LINKS)
def test_steps_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    spec = make_packed(family, tmp_path)
    here, there = (Sequences(spec, batch=2, tokens=64, name="fp16", device=d) for d in DEVICES)
    on_card, on_cpu = (decoder_of(spec, device=device) for device in DEVICES)

    for count in (40, 1, 4, 1):  # a prompt, a step, a short prompt behind others
        ids = torch.randint(VOCAB_SIZE, (2, count))

        found = here.read(on_card.hidden, ids.cuda()).cpu().double()

        expected = there.read(on_cpu.hidden, ids).double()
        assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("family", LINKS)
def test_steps_do_not_depend_on_the_order_in_which_attention_writes(
    family: str, batch: int, tmp_path: Path
) -> None:
    spec = make_packed(family, tmp_path)
    caches = [Sequences(spec, batch=batch, tokens=64, name="fp16", device="cuda") for _ in range(2)]
    caches[1].tables = caches[0].tables
    ordered, plain = (decoder_of(spec, device="cuda") for _ in range(2))
    for span in plain.spans:
        assert span._chains is not None
        span._chains = replace(span._chains, ordered=None)

    for count in (40, 1, 1, 1):
        ids = torch.randint(VOCAB_SIZE, (batch, count)).cuda()

        found, expected = (
            sequences.read(decoder.hidden, ids)
            for sequences, decoder in zip(caches, (ordered, plain), strict=True)
        )

        assert torch.equal(found, expected)
