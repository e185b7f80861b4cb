"""Routers whose logits are ranked before they become scores."""

import torch

from exl2flow.kernels import RouterArgs, RouterRule, Scores, get_ops


def test_the_highest_logits_are_chosen_where_their_scores_are_equal() -> None:
    logits = torch.tensor([[30.0, 200.0, 40.0, -1.0], [-200.0, 0.5, -1.0, 2.0]])
    rule = RouterRule(experts=4, top=2, scores=Scores.TOP_SIGMOID, scales_input=True)

    found = get_ops("cpu").route(logits, RouterArgs(rule=rule, weight=torch.eye(4)))

    assert found.ids.tolist() == [[1, 2], [3, 1]]
    expected = logits.gather(1, found.ids).double().sigmoid().float()
    torch.testing.assert_close(found.weights, expected)


def test_weights_may_be_divided_by_another_norm_than_their_sum() -> None:
    logits = torch.randn(7, 5)
    rule = RouterRule(experts=5, top=3, norm=2.0)

    found = get_ops("cpu").route(logits, RouterArgs(rule=rule, weight=torch.eye(5)))

    shares = logits.double().softmax(-1).gather(1, found.ids)
    expected = shares / shares.square().sum(-1, keepdim=True).sqrt()
    torch.testing.assert_close(found.weights.double(), expected, rtol=1e-5, atol=0)
