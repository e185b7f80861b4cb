"""What a refinement's record tells of experts whose old matrices stay."""

from typing import Any

import pytest

from exl2flow.quant.compile.refined import _before

LAYER = {
    "name": "model.layers.0.mlp.experts.0-1",
    "experts": {"tokens": {"0": 15, "1": 155}},
    "before": {"rel_err": 0.25},
    "projections": {"0.up": {"key": "k", "bits": 3, "nats": 0.1, "before": {"nats": 0.5}}},
}
OLD = {"tokens": {"0": 23, "1": 321}}


@pytest.mark.parametrize(
    ("known", "experts"),
    [
        ({"layers": [{"name": "other"}, 3, {"name": LAYER["name"], "experts": OLD}]}, OLD),
        ({"layers": [{"name": LAYER["name"]}]}, {}),
        ({"layers": 3}, {}),
        ({}, {}),
    ],
)
def test_tokens_are_those_that_the_old_matrices_were_made_with(
    known: dict[str, Any], experts: dict[str, Any]
) -> None:
    report = _before(LAYER, known)

    assert report["experts"] == experts
    assert report["rel_err"] == 0.25
    assert report["projections"]["0.up"] == {"key": "k", "bits": 3, "nats": 0.5}


def test_dense_sublayers_get_no_experts() -> None:
    dense = {name: value for name, value in LAYER.items() if name != "experts"}

    assert "experts" not in _before(dense, {"layers": [{"name": LAYER["name"], "experts": OLD}]})
