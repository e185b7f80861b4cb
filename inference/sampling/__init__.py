"""How the next token is chosen: frozen settings, a chain of pure steps."""

from exl2flow.inference.sampling.chain import sample
from exl2flow.inference.sampling.settings import SamplingSettings

__all__ = ["SamplingSettings", "sample"]
