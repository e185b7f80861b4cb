"""exllamav2 0.3.2's names and meanings, for programs that were written for it."""

import sys
from importlib import import_module

from exl2flow.compat.exllamav2.cache import *  # noqa: F403
from exl2flow.compat.exllamav2.model import *  # noqa: F403
from exl2flow.compat.exllamav2.tensors import *  # noqa: F403
from exl2flow.compat.exllamav2.tokenizer import *  # noqa: F403
from exl2flow.core.errors import ConfigError

__version__ = "0.3.2"
__all__ = [name for name in dir() if name.startswith(("ExLlamaV2", "SeqTensor", "Timer"))]


def install() -> None:
    """Let `import exllamav2` find this package, for libraries that import it by themselves."""
    if getattr(sys.modules.get("exllamav2"), "__name__", __name__) != __name__:
        raise ConfigError("exllamav2 itself is imported; call `install()` before that")
    for name in ("generator", "model_init"):
        import_module(f"{__name__}.{name}")
    ours = {name: module for name, module in sys.modules.items() if name.startswith(__name__)}
    sys.modules.update({"exllamav2" + n.removeprefix(__name__): m for n, m in ours.items()})
