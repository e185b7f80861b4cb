"""Reports by block: the groups that a layer's experts were quantized in are put together again.

A model has up to tens of thousands of experts' matrices, so what people see are their sums by layer
and role. A role is a matrix's name without the number of its expert.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from exl2flow.inference.report.costs import MatrixCost

Item = TypeVar("Item", bound=MatrixCost)
Layer = Mapping[str, Any]  # report on a sublayer or the head


def by_block(layers: Iterable[Layer]) -> list[Layer]:
    """Return one report per sublayer, and one for all groups of a layer's experts together.

    The relative error of experts is the root of the sum of the groups' squares, because their
    errors are added to one state. Other reports are returned as they are.
    """
    blocks: dict[str, list[Layer]] = {}
    for layer in layers:
        blocks.setdefault(block_name(layer), []).append(layer)
    return [
        _together(name, members) if is_group(members[0]) else members[0]
        for name, members in blocks.items()
    ]


def block_name(layer: Layer) -> str:
    """Return the name of a report's sublayer, or that of its layer's experts."""
    name = str(layer["name"])
    return name.rpartition(".")[0] if is_group(layer) else name


def is_group(layer: Layer) -> bool:
    """Return whether a report is on experts of a layer, some or all of them."""
    return isinstance(layer.get("experts"), Mapping)


def _together(name: str, groups: Sequence[Layer]) -> Layer:
    sized = [group for group in groups if group.get("bits") and group.get("bpw")]
    bits = math.fsum(group["bits"] for group in sized)
    weights = math.fsum(group["bits"] / group["bpw"] for group in sized)
    errors = [group.get("rel_err") for group in groups]
    known = [error for error in errors if error is not None]
    return {
        "name": name,
        "bpw": bits / weights if len(sized) == len(groups) else None,
        "rel_err": math.hypot(*known) if len(known) == len(errors) else None,
        "projections": {
            projection: item for group in groups for projection, item in _items(group).items()
        },
    }


def _items(group: Layer) -> Mapping[str, Any]:
    items: Mapping[str, Any] = group.get("projections", {})
    return items


def role_of(name: str) -> str:
    """Return a matrix's name below its layer without the number of its expert."""
    return ".".join(word for word in name.split(".") if not word.isdecimal())


def by_role(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Return role → its matrices, of one block."""
    roles: dict[str, list[Item]] = {}
    for item in items:
        roles.setdefault(role_of(item.name), []).append(item)
    return roles
