"""Operations on a device: the interface `Ops`, its torch implementation and its CUDA kernels."""

from exl2flow.kernels.backend import get_ops, resolve_device, tensor_cores, unused_gpu
from exl2flow.kernels.host_memory import read_in_place
from exl2flow.kernels.interface.activations import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
)
from exl2flow.kernels.interface.attention_rule import AttentionRule
from exl2flow.kernels.interface.boxes import Boxes
from exl2flow.kernels.interface.cache_formats import (
    CACHE_FORMATS,
    LARGEST_HALF,
    PAGE_TOKENS,
    STEP_TOKENS,
    CacheFormat,
    Element,
    LayerStore,
    StepCache,
    slots_at,
    slots_of,
)
from exl2flow.kernels.interface.delta import (
    CHUNK_TOKENS,
    RING,
    DeltaArgs,
    DeltaSegment,
    DeltaSlots,
    DeltaState,
)
from exl2flow.kernels.interface.experts import FEW_EXPERT_ROWS, ExpertBank, ExpertMatrices
from exl2flow.kernels.interface.facts import CardFacts, PlanFacts
from exl2flow.kernels.interface.groups import (
    CHUNK_ELEMENTS,
    MOST_COLUMNS,
    PANEL_ROWS,
    BegunGroups,
    Group,
    Scales,
    by_factor,
    half_ranges,
)
from exl2flow.kernels.interface.norm import NormArgs
from exl2flow.kernels.interface.packed import (
    FEW_ROWS,
    MOST_BESIDE,
    FusedLinear,
    PackedMatrix,
    pack_blocks,
    pack_codes,
    pack_scales,
    pack_zeros,
    whole_tiles,
)
from exl2flow.kernels.interface.router import RouterArgs, RouterRule, Routes, Scores
from exl2flow.kernels.interface.sampling import (
    NOT_FINITE,
    STRONGEST,
    SampledTokens,
    SamplerState,
    SamplerSteps,
)
from exl2flow.kernels.plans.product import MOST_MATRICES
from exl2flow.kernels.reference.ops import Ops
from exl2flow.kernels.reference.refit import times_output
from exl2flow.kernels.reference.steps import halved
from exl2flow.kernels.streams import (
    Threads,
    device_table,
    elapsed,
    on_device,
    record_stream,
    run_concurrently,
)

__all__ = [
    "ACTIVATIONS",
    "CACHE_FORMATS",
    "CHUNK_ELEMENTS",
    "CHUNK_TOKENS",
    "FEW_EXPERT_ROWS",
    "FEW_ROWS",
    "GATED_ACTIVATIONS",
    "LARGEST_HALF",
    "MOST_BESIDE",
    "MOST_COLUMNS",
    "MOST_MATRICES",
    "NOT_FINITE",
    "PAGE_TOKENS",
    "PANEL_ROWS",
    "RING",
    "STEP_TOKENS",
    "STRONGEST",
    "SWIGLU_LIMIT",
    "SWIGLU_SLOPE",
    "AttentionRule",
    "BegunGroups",
    "Boxes",
    "CacheFormat",
    "CardFacts",
    "DeltaArgs",
    "DeltaSegment",
    "DeltaSlots",
    "DeltaState",
    "Element",
    "ExpertBank",
    "ExpertMatrices",
    "FusedLinear",
    "Group",
    "LayerStore",
    "NormArgs",
    "Ops",
    "PackedMatrix",
    "PlanFacts",
    "RouterArgs",
    "RouterRule",
    "Routes",
    "SampledTokens",
    "SamplerState",
    "SamplerSteps",
    "Scales",
    "Scores",
    "StepCache",
    "Threads",
    "by_factor",
    "device_table",
    "elapsed",
    "get_ops",
    "half_ranges",
    "halved",
    "on_device",
    "pack_blocks",
    "pack_codes",
    "pack_scales",
    "pack_zeros",
    "read_in_place",
    "record_stream",
    "resolve_device",
    "run_concurrently",
    "slots_at",
    "slots_of",
    "tensor_cores",
    "times_output",
    "unused_gpu",
    "whole_tiles",
]
