"""A quantized matrix whose values do not matter."""

import torch

from exl2flow.model import QuantizedMatrix, QuantParams

FOUR_BITS = QuantParams(bit_widths=(4,), proportions=(1.0,), group_sizes=(32,))


def zeros(params: QuantParams = FOUR_BITS, k: int = 64, n: int = 32) -> QuantizedMatrix:
    """Return a matrix of the code 0."""
    groups = params.groups(k)
    return QuantizedMatrix.encode(
        codes=torch.zeros(k, n, dtype=torch.uint8),
        groups=groups,
        scale_codes=torch.zeros(len(groups), n, dtype=torch.uint8),
        max_scales=torch.ones(len(groups), dtype=torch.float16),
        perm=torch.arange(k),
    )
