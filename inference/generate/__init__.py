"""Generators: loops over a decoder, a cache and a sampler."""

from exl2flow.inference.generate.base import BaseGenerator, Generation

__all__ = ["BaseGenerator", "Generation"]
