"""Routes against a plain loop over tokens, for every way to score, group and weigh."""

from dataclasses import replace

import pytest
import torch

from exl2flow.kernels import RouterArgs, RouterRule, Scores, get_ops

TOKENS, HIDDEN, EXPERTS, TOP = 50, 16, 12, 3
RULE = RouterRule(experts=EXPERTS, top=TOP)
RULES = {
    "plain": RULE,
    "sum": replace(RULE, norm=1.0),
    "norm of two": replace(RULE, norm=2.0),
    "scaled": replace(RULE, norm=1.0, scaling=2.5),
    "sigmoid": replace(RULE, scores=Scores.SIGMOID, norm=1.0),
    "of the chosen": replace(RULE, scores=Scores.TOP_SOFTMAX),
    "sigmoid of the chosen": replace(RULE, scores=Scores.TOP_SIGMOID),
    "groups": replace(RULE, scores=Scores.SIGMOID, groups=4, top_groups=2),
}
OPS = get_ops("cpu")


def router(rule: RouterRule, *, correction: bool = False, bias: bool = False) -> RouterArgs:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(EXPERTS, HIDDEN + 2, generator=generator)
    return RouterArgs(
        rule=rule,
        weight=drawn[:, :HIDDEN] / 2,
        bias=drawn[:, -2] if bias else None,
        correction=drawn[:, -1] if correction else None,
    )


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))


def chosen(x: torch.Tensor, args: RouterArgs) -> dict[int, float]:
    """Return the experts of one token and their weights, by definition, in fp64."""
    rule = args.rule
    logits = args.weight.double() @ x.double()
    if args.bias is not None:
        logits = logits + args.bias.double()
    scores = {
        Scores.SOFTMAX: logits.softmax(0),
        Scores.SIGMOID: logits.sigmoid(),
        Scores.TOP_SOFTMAX: logits,
        Scores.TOP_SIGMOID: logits,
    }[rule.scores]
    ranked = scores if args.correction is None else scores + args.correction.double()
    size = EXPERTS // rule.groups
    groups = [ranked[g * size : (g + 1) * size] for g in range(rule.groups)]
    best = sorted(range(rule.groups), key=lambda g: -float(groups[g].topk(2).values.sum()))
    allowed = [g * size + e for g in best[: rule.top_groups] for e in range(size)]
    experts = sorted(allowed, key=lambda e: -float(ranked[e]))[:TOP]
    weights = scores[experts]
    if rule.scores is Scores.TOP_SOFTMAX:
        weights = weights.softmax(0)
    if rule.scores is Scores.TOP_SIGMOID:
        weights = weights.sigmoid()
    if rule.norm is not None:
        weights = weights / weights.norm(rule.norm)
    return dict(zip(experts, (weights * rule.scaling).tolist(), strict=True))


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("name", RULES)
def test_routes_are_those_of_the_definition(name: str, with_bias: bool) -> None:
    args = router(RULES[name], correction=with_bias, bias=with_bias)
    x = tokens()

    routes = OPS.route(x, args)

    for token, ids, weights in zip(x, routes.ids.tolist(), routes.weights.tolist(), strict=True):
        found = dict(zip(ids, weights, strict=True))
        assert found == pytest.approx(chosen(token, args), rel=1e-5)


def test_of_equal_scores_the_lower_id_wins() -> None:
    args = RouterArgs(rule=RULE, weight=torch.zeros(EXPERTS, HIDDEN))

    routes = OPS.route(tokens(), args)

    assert routes.ids.tolist() == [[0, 1, 2]] * TOKENS


def test_a_sum_counts_as_the_least_one_where_it_is_less() -> None:
    args = router(replace(RULE, norm=1.0, least_norm=2.0))

    routes = OPS.route(tokens(), args)

    plain = OPS.route(tokens(), replace(args, rule=RULE))
    torch.testing.assert_close(routes.weights, plain.weights / 2.0)


@pytest.mark.parametrize("name", RULES)
def test_experts_that_were_chosen_before_are_weighed_alike(name: str) -> None:
    args, x = router(RULES[name], correction=True), tokens()
    routes = OPS.route(x, args)

    again = OPS.route(x, args, routes.ids)

    assert torch.equal(again.ids, routes.ids)
    assert torch.equal(again.weights, routes.weights)


@pytest.mark.parametrize("name", ["plain", "sigmoid", "of the chosen", "sigmoid of the chosen"])
def test_nearly_chosen_experts_are_scored_by_the_least_chosen_one(name: str) -> None:
    args, x = router(RULES[name]), tokens()

    near = OPS.nearly_chosen(x, args)

    logits = x @ args.weight.T
    scores = logits.sigmoid() if "sigmoid" in name else logits.softmax(-1)
    ids = OPS.route(x, args).ids
    expected = scores / scores.gather(1, ids).amin(1, keepdim=True)
    torch.testing.assert_close(near, expected.scatter(1, ids, 0.0))
    assert float(near.max()) <= 1


def test_the_highest_logits_are_chosen_where_their_scores_are_equal() -> None:
    logits = torch.tensor([[30.0, 200.0, 40.0, -1.0], [-200.0, 0.5, -1.0, 2.0]])
    rule = RouterRule(experts=4, top=2, scores=Scores.TOP_SIGMOID, scales_input=True)

    found = OPS.route(logits, RouterArgs(rule=rule, weight=torch.eye(4)))

    assert found.ids.tolist() == [[1, 2], [3, 1]]
    expected = logits.gather(1, found.ids).double().sigmoid().float()
    torch.testing.assert_close(found.weights, expected)
