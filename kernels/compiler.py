"""Functions of the CUDA sources in `cuda/`, compiled when they are first used.

CuPy compiles with NVRTC for the device at hand and keeps the result on disk.
"""

import re
from functools import cache
from pathlib import Path

import cupy

from exl2flow.kernels import torch_descent, torch_ops, torch_refit
from exl2flow.kernels.ops import MOST_COLUMNS, PANEL_ROWS, SCALE_LEVELS

FOLDER = Path(__file__).with_name("cuda")
GRID_TOGETHER = 8  # multipliers of the grid search that a thread tries side by side

DEFINITIONS = {
    "PANEL_ROWS": PANEL_ROWS,
    "MOST_COLUMNS": MOST_COLUMNS,
    "GRID_TOGETHER": GRID_TOGETHER,
    "GRID_POINTS": torch_ops.GRID_POINTS,
    "SCALE_LEVELS": SCALE_LEVELS,
    "REFIT_MAXIMA": torch_refit.REFIT_MAXIMA,
    "LEAST_CURVATURE": torch_refit.LEAST_CURVATURE,
    "LEAST_UNIT": torch_refit.LEAST_UNIT,
    "MAXIMA": torch_ops.MAXIMA,
    "WIDEST_COLUMNS": torch_ops.WIDEST_COLUMNS,
    "CODE_REACH": torch_ops.CODE_REACH,
    "EXPECTED_SHARE": torch_ops.EXPECTED_SHARE,
    "EPSILON": torch_ops.EPSILON,
    "CLASSES": torch_descent.CLASSES,
    "START_SWEEPS": torch_descent.START_SWEEPS,
    "RETRIES": torch_descent.RETRIES,
}
OPTIONS = (
    "-std=c++17",
    *(f"-D{k}={v}f" if isinstance(v, float) else f"-D{k}={v}" for k, v in DEFINITIONS.items()),
)


def source(file: str) -> str:
    """Return the text of a source, with its headers in place: CuPy's cache sees this text only."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    return re.sub(r'#include "(.*)"\n', lambda match: source(match[1]), text)


@cache
def module(file: str) -> cupy.RawModule:
    """Return a source as a module; CuPy builds it for each device that uses it."""
    return cupy.RawModule(code=source(file), options=OPTIONS)


@cache
def function(file: str, name: str) -> cupy.RawKernel:
    """Return a function of a source."""
    return module(file).get_function(name)
