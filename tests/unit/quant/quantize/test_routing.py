"""Tokens of experts in the log and in the record."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from expert_reports import group_report, model_reports, plain_report
from packed_models import quantized

from exl2flow.core.reports import ExpertTokens, MatrixReport
from exl2flow.model import resolve
from exl2flow.quant.quantize.matrix_work import summary
from exl2flow.quant.quantize.routing import experts_entry, experts_in_log, experts_summary
from exl2flow.quant.quantize.stored_form import Unchanged


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([120, 480, 300], " tokens=120..480 changed_routes=0.0200"),
        ([120, 80, 0], " tokens=0..120 topped_up=2/3 never_routed=1 changed_routes=0.0200"),
    ],
)
def test_the_log_has_tokens_of_a_group_and_names_what_is_amiss(
    tokens: list[int], words: str
) -> None:
    assert experts_in_log(group_report(0, range(4, 7), tokens)) == words


def test_the_log_says_nothing_of_a_group_without_experts_of_its_own() -> None:
    group = group_report(0, range(1), [5])
    only_shared = replace(group, experts=replace(group.experts or ExpertTokens(), tokens={}))

    assert experts_in_log(only_shared) == ""
    assert experts_in_log(plain_report("model.layers.0.mlp", "up_proj")) == ""


def test_groups_of_a_layer_are_summarized_together() -> None:
    layers = [
        plain_report("model.layers.0.self_attn", "q_proj"),
        group_report(0, range(2), [500, 0]),
        group_report(0, range(2, 4), [300, 90]),
        group_report(1, range(2), [100, 200]),
    ]

    first, second = experts_summary(layers).to_json()["layers"]

    assert first == {
        "name": "model.layers.0.mlp.experts",
        "tokens": [500, 0, 300, 90],
        "least": 0,
        "median": 195,
        "most": 500,
        "least_tokens": 100,
        "topped_up": 2,
        "never_routed": [1],
        "changed_routes": 0.02,
    }
    assert second["tokens"] == [100, 200]
    assert second["topped_up"] == 0


@pytest.mark.parametrize(("starved", "warns"), [(1, False), (2, True)])
def test_too_many_topped_up_experts_are_a_warning_with_a_remedy(
    starved: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 20 experts one is 5 %, which is not more than the limit."""
    tokens = [10] * starved + [1000] * (20 - starved)
    layers = [group_report(0, range(20), [1000] * 20), group_report(1, range(20), tokens)]

    with caplog.at_level(logging.WARNING):
        experts_entry(layers)

    assert len(caplog.messages) == warns
    for text in caplog.messages:
        assert text.startswith("in 1 of 2 layers with experts, more than 5 % of the experts")
        assert "`1.mlp.experts` (2 of 20)" in text
        assert "`--rows`" in text


def test_a_dense_model_has_no_entry() -> None:
    assert experts_entry([plain_report("model.layers.0.mlp", "up_proj")]) == {}


def test_matrices_of_experts_are_reported_with_their_names_in_the_model(tmp_path: Path) -> None:
    spec = resolve(make_checkpoint("qwen2-moe", tmp_path))
    attention, experts = spec.sublayers[:2]

    for sublayer in (attention, experts):
        made = [MatrixReport(name=p.name, key=p.key) for p in sublayer.projections]
        packed = [
            Unchanged(p, quantized(p.in_features, p.out_features, torch.arange(p.in_features)), x)
            for p, x in zip(sublayer.projections, made, strict=True)
        ]
        reports = summary(sublayer.name, packed, made).to_json()["projections"]
        if sublayer is attention:
            assert all("key" not in entry for entry in reports.values())
        else:
            keys = {p.name: p.key for p in sublayer.projections}
            assert {name: entry["key"] for name, entry in reports.items()} == keys


def test_groups_are_named_after_their_layers_experts(tmp_path: Path) -> None:
    """The shared expert is in a group of its own if it does not fit into the last one."""
    spec = resolve(make_checkpoint("qwen2-moe", tmp_path))

    divided = replace(spec, group_weights=4 * 3 * 64 * 96)

    groups = [s for s in divided.sublayers if s.group is not None and s.layer_index == 0]
    below = [s.name.removeprefix("model.layers.0.mlp.experts.") for s in groups]
    assert below == ["0-3", "4-7", "shared"]
    assert {s.block for s in groups} == {"model.layers.0.mlp.experts"}


def test_a_model_of_many_layers_is_summarized_in_order() -> None:
    summary = experts_summary(model_reports(layers=12, experts=4, group=3))

    assert [entry.name for entry in summary.layers] == [
        f"model.layers.{layer}.mlp.experts" for layer in range(12)
    ]
