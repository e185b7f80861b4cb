"""Draft tokens one after the other: each pass of a drafting model continues the tokens before."""

from collections.abc import Callable, Mapping

import torch


def chained(
    most: Mapping[int, int],
    proposed: torch.Tensor,
    *,
    least: float,
    run: Callable[[int], None],
) -> dict[int, list[int]]:
    """Return draft tokens by slot, fewer where the drafting model is unsure.

    Args:
        most: slot → the most draft tokens; 0: it follows the first pass only.
        proposed: fp64 (slots, positions, 2), which passes fill; see `likeliest`.
        least: a token of less probability ends a slot's draft.
        run: runs the pass of a position for all slots.
    """
    drafts = {slot: list[int]() for slot in most}
    going, position = {slot for slot in most if most[slot]}, 0
    run(position)
    while going:
        found = proposed[: max(most) + 1, position].tolist()
        going = {slot for slot in going if found[slot][1] >= least}
        for slot in going:
            drafts[slot].append(int(found[slot][0]))
        position += 1
        going = {slot for slot in going if position < most[slot]}
        if going:
            run(position)
    return drafts


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest ids of logits (slots, v), and their probabilities, fp64 (slots, 2)."""
    greatest, best = logits.max(dim=-1)
    probability = torch.exp(greatest - logits.logsumexp(-1))
    return torch.stack((best.double(), probability.double()), dim=-1)
