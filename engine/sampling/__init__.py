"""Choose the next tokens on the device: frozen settings, state per slot, `Ops.sample`."""

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.engine.sampling.bits import completed
from exl2flow.engine.sampling.chain import choose, sample
from exl2flow.engine.sampling.kind import Kind
from exl2flow.engine.sampling.own import OwnProbabilities, own_probabilities
from exl2flow.engine.sampling.slots import SamplerSlots
from exl2flow.kernels import SampledTokens

__all__ = [
    "Kind",
    "OwnProbabilities",
    "SampledTokens",
    "SamplerSlots",
    "SamplingSettings",
    "choose",
    "completed",
    "own_probabilities",
    "sample",
]
