"""Bits of an MTP block: its joint and its sublayers share a budget of their own.

The cost of a candidate is the squared relative error of the states that it changes, as with
`--sensitivity error`: the model's gradients do not reach the block.
"""

import logging
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from exl2flow.core.options.config import ConversionConfig
from exl2flow.model.config.mtp import MtpSpec
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.allocate.block import block_numel
from exl2flow.quant.allocate.budget import allowed
from exl2flow.quant.allocate.groups import SlotGroup, grouped
from exl2flow.quant.allocate.knapsack import solve
from exl2flow.quant.measure.candidates import CANDIDATES
from exl2flow.quant.measure.measurement import projection_bits, slot_projections
from exl2flow.quant.measure.results import Results, Slots
from exl2flow.quant.mtp.pairs import BlockSource
from exl2flow.quant.rounding.error_feedback import RoundingJob, near, padded_weight, round_matrices
from exl2flow.quant.rounding.hessian import relative_error
from exl2flow.quant.sensitivity.fisher import shared_factor

log = logging.getLogger(__name__)

JOINT_OPTIONS = tuple(dict.fromkeys(row["o"] for row in CANDIDATES["attention"]))


def measured_joint(block: BlockSource, hessian: torch.Tensor, config: ConversionConfig) -> Results:
    """Return the candidates of the joint, each with the error of its output.

    Args:
        block: of the source.
        hessian: of what the joint reads, fp32 (2 · hidden, 2 · hidden).
        config: of the run.
    """
    spec, search = block.spec.joint, config.rounding.scale_search
    weight = padded_weight(block.joint)
    item = shared_factor(spec, hessian, {}, config.rounding)
    jobs = [RoundingJob(weight=weight, params=params) for params in JOINT_OPTIONS]
    values = near(weight, block.joint)
    errors = [
        relative_error(hessian, values, matrix.dequantize())
        for matrix in round_matrices(jobs, item, search=search)
    ]
    return Results(
        candidates=tuple({spec.name: params} for params in JOINT_OPTIONS),
        bits=np.array([*map(partial(projection_bits, spec), JOINT_OPTIONS)], np.int64),
        accuracy=1 - torch.stack(errors).double().cpu().numpy(),
    )


def allocated(found: MtpSpec, slots: Slots, config: ConversionConfig) -> dict[str, QuantParams]:
    """Return the parameters of each matrix, by its key, within the block's own budget.

    Args:
        found: the block.
        slots: the candidates of its joint, first, and of its sublayers' parts.
        config: of the run.

    A bitrate below what its candidates reach becomes the least one.
    """
    assert config.block is not None
    allocate, joint = config.allocate, found.joint
    slots = allowed(slots, allocate.prefer)
    others = {name: results for name, results in slots.items() if name != joint.key}
    groups = [SlotGroup(slots=[joint.key]), *grouped(found.layer, others, allocate.experts)]
    bits, costs = [], []
    for group in groups:
        members = [slots[name] for name in group.slots]
        bits.append(group.sums([results.bits.tolist() for results in members]))
        costs.append(group.sums([((1 - r.accuracy) ** 2).tolist() for r in members]))
    numel, least = block_numel(found), sum(map(min, bits))
    budget = int(numel * config.block.bpw)
    if least > budget:  # no reason to lose a conversion
        log.warning(
            "the block that drafts tokens takes %.3f bits per weight, the fewest that its "
            "candidates span, instead of %g (`--mtp-bpw`)",
            least / numel,
            config.block.bpw,
        )
    solution = solve(bits, costs, max(least, budget))
    chosen: dict[str, QuantParams] = {}
    projections = {**slot_projections(found.layer), joint.key: (joint,)}
    for group, index in zip(groups, solution.choice, strict=True):
        for name, place in group.chosen(index).items():
            candidate = slots[name].candidates[place]
            chosen |= {p.key: candidate[p.name] for p in projections[name]}
    return chosen


def used_bits(found: MtpSpec, choice: Mapping[str, QuantParams]) -> int:
    """Return the stored bits of all matrices of a block."""
    return sum(projection_bits(p, choice[p.key]) for p in found.projections)
