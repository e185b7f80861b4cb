"""Kernels that will be needed soon, built in a thread: NVRTC takes seconds for most sources."""

import torch

from exl2flow.core.runtime.background import helpers
from exl2flow.core.runtime.interrupt import look
from exl2flow.kernels.cuda.compiler import build

Functions = tuple[tuple[str, str], ...]  # sources and a function of each, in the order of need

ROUNDING: Functions = (
    ("round.cu", "round_panel"),
    ("search.cu", "column_ranges"),
    ("pack.cu", "pack"),
    ("descend.cu", "descend_panel"),
    ("refit.cu", "wanted_scales"),
)
GENERATION: Functions = (
    ("product.cu", "product<1, false>"),
    ("choose.cu", "choose_few"),
    ("decode.cu", "decode_exl2"),
    ("product.cu", "product<4, false>"),
    ("lay_out.cu", "lay_out"),
    ("select.cu", "select_likeliest"),
)


def build_ahead(functions: Functions) -> None:
    """Start to build functions for the current device; a launch waits for one being built."""
    helpers().submit(_build, functions, torch.cuda.current_device())


def _build(functions: Functions, device: int) -> None:
    for file, name in functions:
        look()
        build(file, name, device)
