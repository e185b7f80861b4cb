"""What all tests share: the package in a bare checkout, the builders in `tiny.py`, the seed."""

import atexit
import importlib.util
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # tensors are tiny here: a second thread costs more than it brings
os.environ["EXL2FLOW_TUNING"] = "off"  # launches are divided as by default; no file of the user's

if "EXL2FLOW_CACHE" not in os.environ:  # processes of one run share it
    os.environ["EXL2FLOW_CACHE"] = tempfile.mkdtemp(prefix="exl2flow-cache-")
    atexit.register(shutil.rmtree, os.environ["EXL2FLOW_CACHE"], ignore_errors=True)

TESTS = Path(__file__).parent
SEED = 20240229

# `python -m pytest` puts the checkout first: a library's `import kernels` would find our folder
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))  # so that every test can import `tiny`


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("exl2flow.core") is not None
    except ModuleNotFoundError:
        return False


if not _is_installed():
    package = ModuleType("exl2flow")
    package.__path__ = [str(TESTS.parent)]
    sys.modules["exl2flow"] = package


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch's generator, and return the seed."""
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture(autouse=True, scope="session")
def _dirty_caches() -> Iterator[None]:
    """Fill new caches with NaN, which uninitialized memory may hold."""
    from exl2flow.kernels.cache_formats import CacheRows

    empty = CacheRows.empty

    def dirty(*args: Any, **options: Any) -> CacheRows:
        rows = empty(*args, **options)
        rows.data.fill_(0xFF)
        rows.scales.fill_(math.nan)
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheRows, "empty", dirty)
        yield
