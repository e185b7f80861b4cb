"""Choose the next token: frozen settings, a chain of pure steps on tensors."""

from exl2flow.core.sampling import SamplingSettings
from exl2flow.inference.sampling.chain import sample
from exl2flow.inference.sampling.drawn import Drawn
from exl2flow.inference.sampling.rows import SamplerRows

__all__ = ["Drawn", "SamplerRows", "SamplingSettings", "sample"]
