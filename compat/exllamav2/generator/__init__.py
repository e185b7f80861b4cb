"""exllamav2's generators, over one `Generator` per cache."""

from exl2flow.compat.exllamav2.generator.base import ExLlamaV2BaseGenerator
from exl2flow.compat.exllamav2.generator.dynamic import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
)
from exl2flow.compat.exllamav2.generator.dynamic_async import (
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJobAsync,
)
from exl2flow.compat.exllamav2.generator.filters import (
    ExLlamaV2Filter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
)
from exl2flow.compat.exllamav2.generator.sampler import (
    ExLlamaV2PostSamplingResult,
    ExLlamaV2Sampler,
)
from exl2flow.compat.exllamav2.generator.streaming import ExLlamaV2StreamingGenerator
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2MMEmbedding

__all__ = [
    "ExLlamaV2BaseGenerator",
    "ExLlamaV2DynamicGenerator",
    "ExLlamaV2DynamicGeneratorAsync",
    "ExLlamaV2DynamicJob",
    "ExLlamaV2DynamicJobAsync",
    "ExLlamaV2Filter",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2PostSamplingResult",
    "ExLlamaV2PrefixFilter",
    "ExLlamaV2Sampler",
    "ExLlamaV2SelectFilter",
    "ExLlamaV2StreamingGenerator",
]
