"""Choose the next tokens on the device: frozen settings, state per slot, a chain of pure steps."""

from exl2flow.core.sampling import SamplingSettings
from exl2flow.inference.sampling.bits import breakers, newline_ids
from exl2flow.inference.sampling.chain import NOT_FINITE, Sampled, sample
from exl2flow.inference.sampling.kind import Kind
from exl2flow.inference.sampling.slots import SamplerSlots

__all__ = [
    "NOT_FINITE",
    "Kind",
    "Sampled",
    "SamplerSlots",
    "SamplingSettings",
    "breakers",
    "newline_ids",
    "sample",
]
