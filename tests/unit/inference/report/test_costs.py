import pytest

from exl2flow.core.reports import MatrixReport, matrices_of, sublayer_reports, total_nats
from exl2flow.inference.report.costs import concentration, dominant, share


def cost(name: str, nats: float | None) -> MatrixReport:
    return MatrixReport(name=name, key=f"s.{name}", bpw=3.0, nats=nats, rel_err=0.1)


def test_reports_give_their_matrices_in_order_under_the_names_of_the_model() -> None:
    item = {"params": "1:3b_64g s4", "bpw": 3.1, "nats": 0.5, "rel_err": 0.25, "bits": 7}
    layers = [
        {"name": "model.layers.0.mlp", "projections": {"up_proj": item, "down_proj": {}}},
        {"name": "model.layers.1.mlp"},
        {"name": "lm_head", "projections": {"lm_head": item}},
    ]

    first, second, head = matrices_of(sublayer_reports(layers))

    assert (first.key, head.key) == ("model.layers.0.mlp.up_proj", "lm_head")
    assert (first.params, first.bpw, first.nats, first.rel_err) == ("1:3b_64g s4", 3.1, 0.5, 0.25)
    assert (second.params, second.bpw, second.nats, second.rel_err) == (None,) * 4


def test_total_is_known_when_all_costs_are() -> None:
    assert total_nats([cost("a", 0.25), cost("b", 0.5)]) == 0.75
    assert total_nats([cost("a", 0.25), cost("b", None)]) is None
    assert total_nats([]) is None


def test_dominant_matrices_are_sorted_by_falling_cost() -> None:
    items = [cost("a", 1.0), cost("b", 3.0), cost("c", 2.0)]

    assert [item.name for item in dominant(items, 2)] == ["b", "c"]
    assert dominant([*items, cost("d", None)], 2) == []


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ([5.0, 3.0, 2.0], "1 of 3 matrices cause 50 % of the estimate"),
        ([4.0, 3.0, 3.0], "2 of 3 matrices cause 70 % of the estimate"),
        ([0.0, 0.0], ""),
        ([1.0, None], ""),
    ],
)
def test_concentration_counts_the_matrices_that_cause_half_of_the_cost(
    costs: list[float | None], text: str
) -> None:
    assert concentration([cost(str(i), nats) for i, nats in enumerate(costs)]) == text


def test_share_is_unknown_without_a_total() -> None:
    assert share(cost("a", 1.0), 4.0) == 0.25
    assert share(cost("a", 1.0), None) is None
    assert share(cost("a", None), 4.0) is None
