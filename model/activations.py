"""Activation functions by the name that `hidden_act` gives them."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]

_gelu_tanh: Activation = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}
