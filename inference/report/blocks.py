"""Reports by block: the groups that a layer's experts were quantized in are put together again.

A model has up to tens of thousands of experts' matrices, so what people see are their sums by layer
and role. A role is a matrix's name without the number of its expert.
"""

import math
from collections.abc import Iterable, Sequence

from exl2flow.core.reports import SublayerReport, matrices_of
from exl2flow.inference.report.costs import Item


def by_block(layers: Iterable[SublayerReport]) -> list[SublayerReport]:
    """Return one report per sublayer, and one for all groups of a layer's experts together.

    The relative error of experts is the root of the sum of the groups' squares, because their
    errors are added to one state. Other reports are returned as they are.
    """
    blocks: dict[str, list[SublayerReport]] = {}
    for layer in layers:
        blocks.setdefault(block_name(layer), []).append(layer)
    return [
        _together(name, members) if is_group(members[0]) else members[0]
        for name, members in blocks.items()
    ]


def block_name(layer: SublayerReport) -> str:
    """Return the name of a report's sublayer, or that of its layer's experts."""
    return layer.name.rpartition(".")[0] if is_group(layer) else layer.name


def is_group(layer: SublayerReport) -> bool:
    """Return whether a report is on experts of a layer, some or all of them."""
    return layer.experts is not None


def _together(name: str, groups: Sequence[SublayerReport]) -> SublayerReport:
    sized = [(group.bits, group.bpw) for group in groups if group.bits and group.bpw]
    weights = math.fsum(bits / bpw for bits, bpw in sized)
    errors = [group.rel_err for group in groups if group.rel_err is not None]
    return SublayerReport(
        name=name,
        matrices=tuple(matrices_of(groups)),
        bpw=math.fsum(b for b, _ in sized) / weights if len(sized) == len(groups) else None,
        rel_err=math.hypot(*errors) if len(errors) == len(groups) else None,
    )


def role_of(name: str) -> str:
    """Return a matrix's name below its layer without the number of its expert."""
    return ".".join(word for word in name.split(".") if not word.isdecimal())


def by_role(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Return role → its matrices, of one block."""
    roles: dict[str, list[Item]] = {}
    for item in items:
        roles.setdefault(role_of(item.name), []).append(item)
    return roles
