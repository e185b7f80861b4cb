"""A chain of products with random codes on a GPU."""

from dataclasses import replace

import torch

from exl2flow.kernels import FusedLinear, Group, NormArgs, PackedMatrix, pack_blocks

DEVICE = "cuda"
HIDDEN, MLP = 2048, 5632
TOLERANCE = 2e-3  # of the norm: fp16 results of fp32 sums


def packed(k: int, n: int, bits: int = 4) -> PackedMatrix:
    groups = tuple(Group(bits=bits, start=start, rows=128) for start in range(0, k, 128))
    shape = (n // 32, len(groups), 8)
    unit = 0x0101 << 16  # fp16 1.5e-5, times squares up to 256
    codes = torch.randint(-(2**31), 2**31, (n // 32, k * bits), dtype=torch.int32, device=DEVICE)
    scales = torch.randint(0, 1 << 16, shape, dtype=torch.int32, device=DEVICE) | unit
    return PackedMatrix(
        words=pack_blocks(codes, scales, groups),
        groups=groups,
        order=torch.randperm(k, device=DEVICE),
        columns=n,
    )


def chain() -> list[FusedLinear]:
    norm = NormArgs(weight=torch.rand(HIDDEN, device=DEVICE).half(), eps=1e-5)
    gate = packed(HIDDEN, MLP)
    up = replace(packed(HIDDEN, MLP), order=gate.order)
    return [
        FusedLinear(matrices=(packed(HIDDEN, HIDDEN),), adds=True),
        FusedLinear(matrices=(gate, up), norm=norm, activation="silu"),
        FusedLinear(matrices=(packed(MLP, HIDDEN),), adds=True),
        FusedLinear(matrices=(packed(HIDDEN, HIDDEN, 6),), norm=norm),
    ]


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, hidden = (torch.randn(rows, HIDDEN, device=DEVICE).half() / 8 for _ in range(2))
    return x, hidden
