"""Load, run, score and inspect models."""

from exl2flow.inference.generate import BaseGenerator, Generation
from exl2flow.inference.load import LoadedModel, load_model
from exl2flow.inference.sampling import SamplingSettings

__all__ = ["BaseGenerator", "Generation", "LoadedModel", "SamplingSettings", "load_model"]
