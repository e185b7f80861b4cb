"""What all tests share: the package in a bare checkout, modules of `support/`, the seed."""

import atexit
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

# tensors are tiny here: a second thread costs more than it brings; `processors.py` wants some
torch.set_num_threads(int(os.environ.get("EXL2FLOW_TEST_THREADS", "1")))
os.environ["EXL2FLOW_TUNING"] = "off"  # launches are divided as by default; no file of the user's

if "EXL2FLOW_CACHE" not in os.environ:  # processes of one run share it
    os.environ["EXL2FLOW_CACHE"] = tempfile.mkdtemp(prefix="exl2flow-cache-")
    atexit.register(shutil.rmtree, os.environ["EXL2FLOW_CACHE"], ignore_errors=True)

TESTS = Path(__file__).parent
SEED = 20240229
LONG = (TESTS / "long.txt").read_text().split()  # `support/long.py` writes it

# `python -m pytest` puts the checkout first: a library's `import kernels` would find our folder
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]
for folder in (TESTS / "support", TESTS.parent / "campaigns"):  # so that tests can import `tiny`
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import checkout  # noqa: E402, F401  # finds the package in a bare checkout


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files and tests in any order")
    parser.addoption("--quick", action="store_true", help="leave out what `long.txt` lists")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that take long, if that is wanted."""
    if not config.getoption("--quick"):
        return None
    return str(collection_path.relative_to(TESTS.parent)) in LONG or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle files, and the tests of each file; tests of a file share fixtures."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    order = random.Random(seed)
    files = [[*tests] for _, tests in groupby(items, key=lambda item: item.path)]
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    items[:] = [test for tests in files for test in tests]


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch's generator, and return the seed."""
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture(autouse=True, scope="session")
def _dirty_caches() -> Iterator[None]:
    """Fill new caches with NaN, which uninitialized memory may hold."""
    from exl2flow.kernels.interface.cache_formats import CacheRows

    empty = CacheRows.empty

    def dirty(*args: Any, **options: Any) -> CacheRows:
        rows = empty(*args, **options)
        rows.data.fill_(0xFF)
        rows.scales.fill_(math.nan)
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheRows, "empty", dirty)
        yield
