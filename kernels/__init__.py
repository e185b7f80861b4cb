"""Kernels behind one interface: a torch implementation that is the specification."""

from exl2flow.kernels.ops import (
    PANEL_ROWS,
    Group,
    Ops,
    device_table,
    get_ops,
    half_ranges,
    resolve_device,
    tensor_cores,
)

__all__ = [
    "PANEL_ROWS",
    "Group",
    "Ops",
    "device_table",
    "get_ops",
    "half_ranges",
    "resolve_device",
    "tensor_cores",
]
