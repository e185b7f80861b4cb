"""Measure speed and memory of a model, for `exl2flow bench` and the benchmarks."""

from exl2flow.inference.bench.batch import DecodeBatch
from exl2flow.inference.bench.decode_plan import DecodePlan
from exl2flow.inference.bench.run import bench
from exl2flow.inference.bench.speed import Memory, Speed, Timing
from exl2flow.inference.bench.stopwatch import copy_rate, milliseconds, seconds

__all__ = [
    "DecodeBatch",
    "DecodePlan",
    "Memory",
    "Speed",
    "Timing",
    "bench",
    "copy_rate",
    "milliseconds",
    "seconds",
]
