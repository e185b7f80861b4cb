"""Experts of a group side by side: which of their matrices, and how many at a time.

On a GPU, launches of one expert's matrices take longer than their work. All depends on shapes only,
because products of another size may round differently there.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from exl2flow.model import SublayerSpec
from exl2flow.quant.walk.working_memory import MOST_TOGETHER

T = TypeVar("T")


def runs_together(
    spec: SublayerSpec, captures: Sequence[str], device: torch.device, *, copies: int = 1
) -> list[list[str]]:
    """Divide captures into runs whose readers are alike: one each, but for experts on a GPU.

    A run with several has readers of one shape, equally many of each capture, and as many copies
    of an expert's matrices as a batch has at most.
    """
    runs: dict[object, list[str]] = {}
    for capture in captures:
        readers = spec.reading(capture)
        shapes = {(p.in_features, p.out_features) for p in readers}
        is_alike = device.type == "cuda" and len(shapes) == 1 and readers[0].is_routed
        is_alike = is_alike and copies * sum(p.numel for p in readers) <= MOST_TOGETHER
        key = (shapes.pop(), len(readers)) if is_alike else capture
        runs.setdefault(key, []).append(capture)
    return list(runs.values())


def factored_apart(
    spec: SublayerSpec, runs: Sequence[Sequence[str]]
) -> Iterator[list[Sequence[str]]]:
    """Divide runs into those whose Hessians are factored before any of them is rounded.

    Factoring forbids TF32 to the whole process (`tensor_cores`), so nothing else may run meanwhile.
    Of experts that are rounded one by one, memory does not grow with their number.
    """
    found: list[Sequence[str]] = []
    elements = 0
    for run in runs:
        more = sum(spec.widths[capture] ** 2 for capture in run)
        if spec.group and found and elements + more > MOST_TOGETHER:
            yield found
            found, elements = [], 0
        found, elements = [*found, run], elements + more
    if found:
        yield found


def batches(items: Sequence[T], elements: int) -> Iterator[Sequence[T]]:
    """Yield about equal batches of experts with a number of elements each, at least one expert."""
    most = max(1, MOST_TOGETHER // elements)
    count = -(-len(items) // most)
    size = -(-len(items) // count)
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
