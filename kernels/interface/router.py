"""The router of a layer of experts: which experts compute a token, and with which weights."""

from dataclasses import dataclass
from enum import StrEnum

import torch


class Scores(StrEnum):
    """The rule by which a router's logits become the scores of its experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    # the highest logits are chosen, then these become scores
    TOP_SOFTMAX = "softmax of the chosen"
    TOP_SIGMOID = "sigmoid of the chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """The rule by which a router chooses `top` of `experts` and weighs them.

    norm: the weights of a token are divided by their p-norm with this p (None: not at all);
    least_norm: which counts as this at least; scaling: multiplies them then.
    groups: equal groups of neighbouring experts, of which only those in the `top_groups` with the
    highest sums of their two best scores may be chosen.
    scales_input: the weight multiplies what the expert reads, not its output.
    """

    experts: int
    top: int
    scores: Scores = Scores.SOFTMAX
    norm: float | None = None
    least_norm: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    scales_input: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterArgs:
    """A router's tensors, all fp32.

    weight: (experts, k); bias: of the logits, (experts,), or None; correction: added to scores when
    experts are chosen, not to weights, (experts,), or None.
    """

    rule: RouterRule
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """The chosen experts of tokens, int64 (t, top), and their weights, fp32 (t, top)."""

    ids: torch.Tensor
    weights: torch.Tensor
