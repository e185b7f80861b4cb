"""exllamav2's generators, over one `Generator` per cache."""

from exl2flow.compat.exllamav2.generator.base import *  # noqa: F403
from exl2flow.compat.exllamav2.generator.dynamic import *  # noqa: F403
from exl2flow.compat.exllamav2.generator.dynamic_async import *  # noqa: F403
from exl2flow.compat.exllamav2.generator.filters import *  # noqa: F403
from exl2flow.compat.exllamav2.generator.job import *  # noqa: F403
from exl2flow.compat.exllamav2.generator.sampler import *  # noqa: F403
from exl2flow.compat.exllamav2.generator.streaming import *  # noqa: F403
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2MMEmbedding  # noqa: F401

__all__ = [name for name in dir() if name.startswith("ExLlamaV2")]
