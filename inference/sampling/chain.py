"""The sampler on a device."""

import torch

from exl2flow.inference.sampling.kind import Kind
from exl2flow.inference.sampling.slots import SamplerSlots
from exl2flow.kernels import Sampled, get_ops


@torch.inference_mode()
def sample(logits: torch.Tensor, slots: SamplerSlots, draws: torch.Tensor, kind: Kind) -> Sampled:
    """Choose an id for each of the first n slots, and append it to its history.

    See `Ops.sample`; `kind` serves the settings of all active slots among them.
    """
    ops = get_ops(logits.device)
    return ops.sample(logits, slots.state(len(logits), kind), draws, kind)
