"""Kernels behind one interface: a torch implementation that is the specification."""

from exl2flow.kernels.ops import (
    CHUNK_ELEMENTS,
    MOST_COLUMNS,
    PANEL_ROWS,
    BegunGroups,
    Group,
    Ops,
    Scales,
    device_table,
    get_ops,
    half_ranges,
    resolve_device,
    tensor_cores,
)
from exl2flow.kernels.streams import at_the_same_time, used_here
from exl2flow.kernels.torch_refit import times_output

__all__ = [
    "CHUNK_ELEMENTS",
    "MOST_COLUMNS",
    "PANEL_ROWS",
    "BegunGroups",
    "Group",
    "Ops",
    "Scales",
    "at_the_same_time",
    "device_table",
    "get_ops",
    "half_ranges",
    "resolve_device",
    "tensor_cores",
    "times_output",
    "used_here",
]
