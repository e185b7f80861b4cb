"""exl2flow turns Hugging Face language models into EXL2 quantized models, and runs them.

`exl2flow.inference` loads models and generates texts, `exl2flow.flows` converts; the command is
`exl2flow`.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("exl2flow")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"
