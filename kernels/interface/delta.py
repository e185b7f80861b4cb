"""The gated delta rule: what a layer with a state computes between its products."""

from dataclasses import dataclass

import torch

CHUNK_TOKENS = 64  # of the rule by chunks; a text cut at multiples of it has the same bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaArgs:
    """Tensors of a layer, all fp32.

    conv: (channels, 4), of queries, keys and values in turn; decay: -exp(A_log), step: bias of the
    step's size, (value_heads,) each; gate, step_weight: maps of the normed hidden state to β and to
    the step's size, (value_heads, hidden); norm: (value_dim,), of outputs, with `eps`.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: torch.Tensor
    decay: torch.Tensor
    step: torch.Tensor
    gate: torch.Tensor
    step_weight: torch.Tensor
    norm: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaState:
    """What texts have left behind.

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
