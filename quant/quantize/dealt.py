"""Matrices of a sublayer dealt to ranks: who rounds which, and how all get them."""

from collections.abc import Mapping

import torch

from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.model import Sublayer
from exl2flow.quant.quantize.stored_form import Packed, Received
from exl2flow.quant.rounding.error_feedback import RoundedMatrix
from exl2flow.quant.rounding.together import runs_together
from exl2flow.quant.walk.source_model import device_of

HALVES = 2  # of experts side by side, whatever the number of ranks


def deal_runs(sublayer: Sublayer, ranks: WorkRanks) -> tuple[list[list[str]], dict[str, int]]:
    """Return the captures whose readers this rank rounds, run by run; and capture → rank.

    Runs, which see `runs_together`, do not depend on the number of ranks.
    """
    spec = sublayer.spec
    runs = [
        run[half::HALVES]
        for run in runs_together(spec, spec.widest_first, device_of(sublayer))
        for half in range(min(HALVES, len(run)))
    ]
    readers = [[p for capture in run for p in spec.reading(capture)] for run in runs]
    costs = [float(sum(p.in_features * p.numel for p in found)) for found in readers]
    dealt = ranks.owners(costs)
    owners = {capture: rank for run, rank in zip(runs, dealt, strict=True) for capture in run}
    return [run for run, rank in zip(runs, dealt, strict=True) if rank == ranks.rank], owners


def shared_by_all(
    rounded: Mapping[str, RoundedMatrix], ranks: WorkRanks
) -> dict[str, RoundedMatrix]:
    """Return projection → the matrix that a rank has rounded, of all ranks, at each of them."""
    if not ranks.are_many:
        return dict(rounded)
    found = dict[str, RoundedMatrix]()
    for owner in range(ranks.count):
        own = {f"{n}/{field}": x for n, m in rounded.items() for field, x in m.tensors().items()}
        groups = ranks.told({name: matrix.groups for name, matrix in rounded.items()}, owner)
        tensors = ranks.bring(own if owner == ranks.rank else None, owner)
        for name in groups:
            fields = {field: tensors[f"{name}/{field}"] for field in RoundedMatrix.FIELDS}
            found[name] = RoundedMatrix.from_tensors(groups[name], fields)
    return found


def of_all_ranks(sublayer: Sublayer, own: Mapping[str, Packed], ranks: WorkRanks) -> list[Packed]:
    """Return the matrices of all ranks, in order; only at rank 0 can they be reported on.

    Args:
        sublayer: whose they are.
        own: projection → matrix of this rank.
        ranks: that have rounded some each.
    """
    projections = sublayer.spec.projections
    if not ranks.are_many:
        return [own[p.name] for p in projections]
    stored, figures = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    by_rank = ranks.told_by_all({name: item.words for name, item in own.items()})
    words = {name: told for of_rank in by_rank for name, told in of_rank.items()}
    for owner in range(ranks.count):
        mine, told = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for item in own.values() if owner == ranks.rank else ():
            mine |= item.matrix.to_tensors(item.projection.key)
            told |= item.tensors()
        is_own = owner == ranks.rank
        stored |= ranks.bring(mine if is_own else None, owner)
        figures |= ranks.bring(told if is_own else None, owner, to=0)
    return [own.get(p.name) or Received(p, stored, figures, words[p.name]) for p in projections]
