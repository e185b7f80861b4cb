"""Kernels behind one interface: a torch implementation that is the specification."""

from exl2flow.kernels.backend import get_ops, resolve_device
from exl2flow.kernels.interface.activations import ACTIVATIONS
from exl2flow.kernels.interface.attention_rule import AttentionRule
from exl2flow.kernels.interface.cache_formats import (
    CACHE_FORMATS,
    LARGEST_HALF,
    PAGE_TOKENS,
    CacheFormat,
    Element,
    LayerStore,
    slots_at,
    slots_of,
)
from exl2flow.kernels.interface.cache_ops import STEP_TOKENS
from exl2flow.kernels.interface.groups import PANEL_ROWS, Group
from exl2flow.kernels.interface.norm import NormArgs
from exl2flow.kernels.interface.ops import (
    CHUNK_ELEMENTS,
    FEW_ROWS,
    MOST_BESIDE,
    MOST_COLUMNS,
    BegunGroups,
    Ops,
    Scales,
    device_table,
    half_ranges,
    tensor_cores,
)
from exl2flow.kernels.interface.packed import (
    FusedLinear,
    PackedMatrix,
    pack_codes,
    pack_scales,
    pack_zeros,
    whole_tiles,
)
from exl2flow.kernels.interface.sampler_ops import COLUMNS as SAMPLER_COLUMNS
from exl2flow.kernels.interface.sampler_ops import (
    NOT_FINITE,
    STRONGEST,
    SampledTokens,
    SamplerState,
    SamplerSteps,
)
from exl2flow.kernels.plans.product import MOST_MATRICES
from exl2flow.kernels.reference.refit import times_output
from exl2flow.kernels.reference.steps import halved
from exl2flow.kernels.streams import Threads, on_device, record_stream, run_concurrently

__all__ = [
    "ACTIVATIONS",
    "CACHE_FORMATS",
    "CHUNK_ELEMENTS",
    "FEW_ROWS",
    "LARGEST_HALF",
    "MOST_BESIDE",
    "MOST_COLUMNS",
    "MOST_MATRICES",
    "NOT_FINITE",
    "PAGE_TOKENS",
    "PANEL_ROWS",
    "SAMPLER_COLUMNS",
    "STEP_TOKENS",
    "STRONGEST",
    "AttentionRule",
    "BegunGroups",
    "CacheFormat",
    "Element",
    "FusedLinear",
    "Group",
    "LayerStore",
    "NormArgs",
    "Ops",
    "PackedMatrix",
    "SampledTokens",
    "SamplerState",
    "SamplerSteps",
    "Scales",
    "Threads",
    "device_table",
    "get_ops",
    "half_ranges",
    "halved",
    "on_device",
    "pack_codes",
    "pack_scales",
    "pack_zeros",
    "record_stream",
    "resolve_device",
    "run_concurrently",
    "slots_at",
    "slots_of",
    "tensor_cores",
    "times_output",
    "whole_tiles",
]
