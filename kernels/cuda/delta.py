"""The gated delta rule on a GPU: a kernel for a few new tokens; prompts are torch's."""

import numpy as np
import torch

from exl2flow.kernels.cuda.compiler import launch
from exl2flow.kernels.interface.delta import DeltaArgs, DeltaSlots
from exl2flow.kernels.reference import delta as torch_delta

HEAD_DIM, TAPS = 128, 4  # that the kernel has
THREADS = 256  # of a CTA, two for a column of a state


def delta_step(
    x: torch.Tensor,
    qkv: torch.Tensor,
    z: torch.Tensor,
    args: DeltaArgs,
    slots: DeltaSlots,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """See `Ops.delta_step`: one launch, a CTA for a value head of a text."""
    sizes = (args.key_dim, args.value_dim, args.conv.shape[1])
    if x.dtype != torch.float16 or sizes != (HEAD_DIM, HEAD_DIM, TAPS):
        return torch_delta.delta_step(x, qkv, z, args, slots, lengths)
    batch, count, hidden = x.shape
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    launch(
        "delta.cu",
        "delta_step",
        (args.value_heads, batch),
        *(x.contiguous(), qkv.contiguous(), z.contiguous(), y, lengths),
        *(args.conv, args.decay, args.step, args.gate, args.step_weight, args.norm),
        *(slots.state, slots.behind, slots.keys, slots.deltas, slots.decays, slots.inputs),
        *(slots.aside, slots.aside_inputs, slots.aside_at),
        *(count, hidden, args.key_heads, np.float32(args.eps)),
        threads=THREADS,
    )
    return y
