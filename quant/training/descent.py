"""Steps of a training: Adam at rates of each parameter's own, which rise and fall."""

import math
from collections.abc import Sequence

import torch

from exl2flow.quant.training.trainable import Parameter

BETAS = (0.9, 0.99)
EPSILON = 1e-12  # gradients of single embedding entries are tiny
WARM_UP = 0.05  # share of the steps in which the rates rise
LEAST_RATE = 0.02  # share of the rates at the last step


class Descent:
    """Parameters on their way, Adam's moments, and the best values so far."""

    def __init__(self, parameters: Sequence[Parameter], steps: int) -> None:
        """Begin at step 0 of `steps`."""
        self.parameters, self.steps, self.done = parameters, steps, 0
        self.values = [p.value for p in parameters]
        groups = [{"params": [p.value], "lr": p.rate} for p in parameters]
        self._adam = torch.optim.Adam(groups, betas=BETAS, eps=EPSILON)
        for value in self.values:  # allocated now, to be restored
            self._adam.state[value] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(value, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(value, requires_grad=False),
            }
        self.best = [value.detach().clone() for value in self.values]

    @property
    def changing(self) -> list[torch.Tensor]:
        """All tensors that steps change, in order."""
        states = [self._adam.state[value] for value in self.values]
        moments = [state[name] for name in ("exp_avg", "exp_avg_sq") for state in states]
        return [*self.values, *moments, *self.best]

    def forget_gradients(self) -> None:
        """Free the gradients of the last step."""
        self._adam.zero_grad(set_to_none=True)

    def step(self, *, distance: float = 1.0, codes: float = 1.0) -> None:
        """Follow the gradients; `codes` scales the rates of codes, `distance` all others."""
        share = rate_share(self.done, self.steps)
        for group, parameter in zip(self._adam.param_groups, self.parameters, strict=True):
            group["lr"] = parameter.rate * share * (codes if parameter.is_code else distance)
        self._adam.step()
        self.done += 1

    @torch.no_grad()
    def keep(self) -> None:
        """Call the current values the best."""
        for best, value in zip(self.best, self.values, strict=True):
            best.copy_(value)

    @torch.no_grad()
    def recall(self) -> None:
        """Put the best values back."""
        for best, value in zip(self.best, self.values, strict=True):
            value.copy_(best)

    @torch.no_grad()
    def begin_again(self) -> None:
        """Go back to the best values, and forget all that was learnt about the gradients."""
        self.recall()
        for value in self.values:
            for name in ("exp_avg", "exp_avg_sq"):
                self._adam.state[value][name].zero_()
        self.resume(0)

    def resume(self, done: int) -> None:
        """Continue after a step; `changing` has been restored."""
        self.done = done
        for value in self.values:
            self._adam.state[value]["step"].fill_(done)


def rate_share(step: int, steps: int) -> float:
    """Return the multiplier of the rates at a step: linear warm-up, then half a cosine."""
    first = max(1, round(WARM_UP * steps))
    if step < first:
        return (step + 1) / first
    angle = math.pi * (step - first) / max(1, steps - first)
    return LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(angle)) / 2
