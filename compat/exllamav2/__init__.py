"""exllamav2 0.3.2's names and meanings, for programs that were written for it."""

import sys
from importlib import import_module

from exl2flow.compat.exllamav2.cache import (
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
)
from exl2flow.compat.exllamav2.model import (
    ExLlamaV2,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2VisionTower,
)
from exl2flow.compat.exllamav2.tensors import SeqTensor, Timer
from exl2flow.compat.exllamav2.tokenizer import ExLlamaV2MMEmbedding, ExLlamaV2Tokenizer
from exl2flow.core.errors import ConfigError

__version__ = "0.3.2"
__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "ExLlamaV2MMEmbedding",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "SeqTensor",
    "Timer",
]


def install() -> None:
    """Let `import exllamav2` find this package, for libraries that import it by themselves."""
    if getattr(sys.modules.get("exllamav2"), "__name__", __name__) != __name__:
        raise ConfigError("exllamav2 itself is imported; call `install()` before that")
    for name in ("generator", "model_init"):
        import_module(f"{__name__}.{name}")
    ours = {name: module for name, module in sys.modules.items() if name.startswith(__name__)}
    sys.modules.update({"exllamav2" + n.removeprefix(__name__): m for n, m in ours.items()})
