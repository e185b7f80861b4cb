"""The gated delta rule: chunks against tokens, and cuts."""

import pytest
import torch

from exl2flow.kernels import CHUNK_TOKENS, DeltaArgs, DeltaState
from exl2flow.kernels.reference.delta import gated_delta

HIDDEN, KEY_HEADS, VALUE_HEADS, DIM = 48, 2, 4, 32
CHANNELS, WIDTH = (2 * KEY_HEADS + VALUE_HEADS) * DIM, VALUE_HEADS * DIM


def layer(seed: int = 0) -> DeltaArgs:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return DeltaArgs(
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        conv=drawn(CHANNELS, 4) / 2,
        decay=-drawn(VALUE_HEADS).exp(),
        step=drawn(VALUE_HEADS),
        gate=drawn(VALUE_HEADS, HIDDEN) * HIDDEN**-0.5,
        step_weight=drawn(VALUE_HEADS, HIDDEN) * HIDDEN**-0.5,
        norm=1 + 0.1 * drawn(DIM),
        eps=1e-6,
    )


def inputs(count: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return tuple(  # type: ignore[return-value]  # three of them
        torch.randn(batch, count, width, generator=generator) for width in (HIDDEN, CHANNELS, WIDTH)
    )


@pytest.mark.parametrize("count", [1, 24, 64, 80, 300])
def test_chunks_are_what_tokens_are(count: int) -> None:
    args, given = layer(), inputs(count)
    expected, state = gated_delta(*given, args, in_chunks=False)

    found, found_state = gated_delta(*given, args)

    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(found_state.state, state.state, rtol=0, atol=2e-5)
    assert torch.equal(found_state.inputs, state.inputs)
    assert expected.std() > 0.1


def in_parts(
    given: tuple[torch.Tensor, ...], cuts: tuple[int, ...], args: DeltaArgs
) -> tuple[torch.Tensor, DeltaState]:
    """Read a text part after part."""
    outputs, state = list[torch.Tensor](), DeltaState.empty(args, len(given[0]))
    for begin, end in zip((0, *cuts), (*cuts, given[0].shape[1]), strict=True):
        x, qkv, z = (y[:, begin:end] for y in given)
        output, state = gated_delta(x, qkv, z, args, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("cuts", [(64,), (128, 192), (64, 128, 192, 256)], ids=str)
def test_cuts_between_chunks_change_no_bit(cuts: tuple[int, ...]) -> None:
    args, given = layer(), inputs(300)
    assert all(cut % CHUNK_TOKENS == 0 for cut in cuts)
    expected, state = gated_delta(*given, args)

    found, found_state = in_parts(given, cuts, args)

    assert torch.equal(found, expected)
    assert torch.equal(found_state.state, state.state)


@pytest.mark.parametrize("cuts", [(1,), (3, 100), (63, 65, 191)], ids=str)
def test_other_cuts_differ_by_rounding(cuts: tuple[int, ...]) -> None:
    args, given = layer(), inputs(230)
    expected, state = gated_delta(*given, args)

    found, found_state = in_parts(given, cuts, args)

    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(found_state.state, state.state, rtol=0, atol=2e-5)


def test_gradients_are_those_of_the_rule_by_tokens() -> None:
    args, found = layer(), list[list[torch.Tensor]]()
    weights = torch.randn(2, 90, WIDTH, generator=torch.Generator().manual_seed(1))
    for in_chunks in (True, False):
        given = [y.requires_grad_() for y in inputs(90)]
        output, _ = gated_delta(*given, args, in_chunks=in_chunks)
        found.append(list(torch.autograd.grad((output * weights).sum(), given)))
    for chunked, by_token in zip(*found, strict=True):
        assert by_token.abs().max() > 0.1
        torch.testing.assert_close(chunked, by_token, rtol=1e-3, atol=1e-4)
