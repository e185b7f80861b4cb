"""The gated delta rule: what a layer with a state computes between its products."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from exl2flow.kernels.interface.cache_formats import PAGE_TOKENS, STEP_TOKENS

CHUNK_TOKENS = 64  # of the rule by chunks; a text cut at multiples of it has the same bits
# Inputs of the convolution that slots keep, by position modulo this: of pending tokens, of new
# ones, and of those before a page border among the former
RING = 2 * STEP_TOKENS + 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaArgs:
    """Tensors of a layer, all fp32.

    conv: (channels, 4), of queries, keys and values in turn; decay: -exp(A_log), step: bias of the
    step's size, (value_heads,) each; maps: of the normed hidden state to β, then to the step's
    size, (2 · value_heads, hidden); norm: (value_dim,), of outputs, with `eps`.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: torch.Tensor
    decay: torch.Tensor
    step: torch.Tensor
    maps: torch.Tensor
    norm: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaState:
    """The states that texts have left behind.

    state: fp32 (b, value_heads, key_dim, value_dim); inputs: of the convolution, the last three,
    fp32 (b, 3, channels).
    """

    state: torch.Tensor
    inputs: torch.Tensor

    @classmethod
    def empty(cls, args: DeltaArgs, batch: int) -> "DeltaState":
        """Return the state of empty texts."""
        shape = (batch, args.value_heads, args.key_dim, args.value_dim)
        zeros = args.conv.new_zeros
        channels, taps = args.conv.shape
        return cls(state=zeros(shape), inputs=zeros(batch, taps - 1, channels))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaSlots:
    """States of the slots of a generator in one layer; they lag behind the texts.

    `state` includes the first `behind` tokens of a text. The tokens of the last step, up to
    `STEP_TOKENS`, may still be rejected: they are pending, stored as rank-one updates. The next
    step first applies those within the text's length. `aside` is the state at the last page border
    that `state` has passed.

    state: fp32 (slots, value_heads, key_dim, value_dim); behind: int32 (slots, value_heads), equal
    for all heads, each of which a CTA changes; keys, deltas, decays: of pending tokens, fp32
    (slots, `STEP_TOKENS`, value_heads, key_dim), (…, value_dim) and (slots, `STEP_TOKENS`,
    value_heads), logarithms; inputs: of the convolution, those of position p at p modulo `RING`,
    (slots, RING, channels); aside: like state; aside_inputs: the three before it, (slots, 3,
    channels); aside_at: int32 (slots,), its tokens, 0: none; page_tokens: between page borders.
    """

    state: torch.Tensor
    behind: torch.Tensor
    keys: torch.Tensor
    deltas: torch.Tensor
    decays: torch.Tensor
    inputs: torch.Tensor
    aside: torch.Tensor
    aside_inputs: torch.Tensor
    aside_at: torch.Tensor
    page_tokens: int = PAGE_TOKENS

    @classmethod
    def empty(
        cls,
        *leading: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        channels: int,
        taps: int,
        element: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """Return empty states, (*leading, …), where the last of `leading` is slots.

        element: of the inputs of the convolution.
        """
        state = value_heads, key_dim, value_dim

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*leading, *shape, dtype=dtype, device=device)

        return cls(
            state=zeros(*state),
            behind=zeros(value_heads, dtype=torch.int32),
            keys=zeros(STEP_TOKENS, value_heads, key_dim),
            deltas=zeros(STEP_TOKENS, value_heads, value_dim),
            decays=zeros(STEP_TOKENS, value_heads),
            inputs=zeros(RING, channels, dtype=element),
            aside=zeros(*state),
            aside_inputs=zeros(taps - 1, channels, dtype=element),
            aside_at=zeros(dtype=torch.int32),
        )

    def layer(self, index: int) -> "DeltaSlots":
        """Return one layer of states (layers, slots, …)."""
        one: dict[str, Any] = {name: x[index] for name, x in self.named.items()}
        return replace(self, **one)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [*self.named.values()]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """All tensors, by the names of their fields."""
        names = [f.name for f in fields(self) if f.name != "page_tokens"]
        return {name: getattr(self, name) for name in names}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSegment:
    """Tokens of a prompt in a pass: `start` to `start + count` there, from position `begin` on."""

    slot: int
    begin: int
    start: int
    count: int
