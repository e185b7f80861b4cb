"""The torch implementation of routers."""

import torch

from exl2flow.kernels.interface.router import RouterArgs, RouterRule, Routes, Scores

BEST_OF_GROUP = 2  # scores whose sum ranks a group


def route(x: torch.Tensor, router: RouterArgs, ids: torch.Tensor | None = None) -> Routes:
    """Choose experts for tokens x (t, k), all in fp32; of equal scores the lower id wins.

    ids: int64 (t, top), of experts that were chosen before and are only weighed.
    """
    rule = router.rule
    logits = torch.nn.functional.linear(x.float(), router.weight, router.bias)
    match rule.scores:
        case Scores.SOFTMAX:
            scores = logits.softmax(-1)
        case Scores.SIGMOID:
            scores = logits.sigmoid()
        case Scores.TOP_SOFTMAX | Scores.TOP_SIGMOID:
            scores = logits
    if ids is None:
        ranked = scores if router.correction is None else scores + router.correction
        ids = _highest(_within_groups(ranked, rule), rule.top)
    weights = scores.gather(-1, ids)
    if rule.scores is Scores.TOP_SOFTMAX:
        weights = weights.softmax(-1)
    elif rule.scores is Scores.TOP_SIGMOID:
        weights = weights.sigmoid()
    if rule.norm is not None:
        size = torch.linalg.vector_norm(weights, ord=rule.norm, dim=-1, keepdim=True)
        weights = weights / size.clamp(min=rule.least_norm)
    return Routes(ids=ids, weights=weights * rule.scaling)


def nearly_chosen(x: torch.Tensor, router: RouterArgs) -> torch.Tensor:
    """Return each expert's score over that of the least chosen one, fp32 (t, experts).

    At most 1; 0 where the expert is chosen.
    """
    ids = route(x, router).ids
    logits = torch.nn.functional.linear(x.float(), router.weight, router.bias)
    match router.rule.scores:
        case Scores.SIGMOID | Scores.TOP_SIGMOID:
            logs = torch.nn.functional.logsigmoid(logits)
        case Scores.SOFTMAX | Scores.TOP_SOFTMAX:
            logs = logits  # ratios of a softmax are those of the exponentials
    least = logs.gather(-1, ids).amin(-1, keepdim=True)
    return (logs - least).clamp(max=0).exp().scatter(-1, ids, 0.0)


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns of the highest scores (t, n), the lower one first where they are equal."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _within_groups(scores: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    """Return scores (t, experts) with -inf outside the best groups."""
    if rule.groups == 1:
        return scores
    grouped = scores.view(len(scores), rule.groups, -1)
    sums = grouped.sort(dim=-1, descending=True).values[..., :BEST_OF_GROUP].sum(-1)
    outside = torch.ones_like(sums, dtype=torch.bool)
    outside.scatter_(-1, _highest(sums, rule.top_groups), False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
