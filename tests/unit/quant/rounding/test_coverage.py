"""Hessians of experts: their own tokens, those that nearly chose them, and their layer's."""

from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from exl2flow.model import CanonicalTensors, build_sublayer, resolve
from exl2flow.model.layers.experts import ExpertsSublayer
from exl2flow.quant.rounding.coverage import SAMPLE, Coverage
from exl2flow.quant.rounding.hessian import collect_hessians

ROWS, TOKENS, HIDDEN, INNER, EXPERTS = 3, 40, 64, 32, 8
ALL = ROWS * TOKENS


@pytest.fixture
def sublayer(tmp_path: Path) -> ExpertsSublayer:
    spec = resolve(make_tiny("qwen2-moe", tmp_path / "model"))
    tensors = CanonicalTensors(spec)
    built = build_sublayer(spec, spec.sublayers[1], tensors, dtype=torch.float32, device="cpu")
    assert isinstance(built, ExpertsSublayer)
    return built


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(ROWS, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))


def coverage_of(sublayer: ExpertsSublayer, states: torch.Tensor, least: int) -> Coverage:
    coverage = Coverage.of(sublayer, states, least)
    assert coverage is not None
    return coverage


def starve(sublayer: ExpertsSublayer, expert: int) -> None:
    """Make a router score an expert lower than all others, whatever it reads."""
    sublayer.router.weight[expert] = 0.0
    sublayer.normed = lambda role, x: x.abs()  # type: ignore[method-assign]
    sublayer.router.weight[expert] = -10.0


def mean(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of x xᵀ, fp64 (k, k)."""
    weights = torch.ones(len(x)) if weights is None else weights
    return (x.double().T * weights.double()) @ x.double() / weights.double().sum()


def test_tokens_are_counted_per_expert(sublayer: ExpertsSublayer, states: torch.Tensor) -> None:
    coverage = coverage_of(sublayer, states, 1)

    ids = sublayer.routes(states).ids
    assert coverage.counts == {e: int((ids == e).sum()) for e in range(EXPERTS)}
    assert sum(coverage.counts.values()) == 2 * ALL
    assert not coverage.added


def test_sublayers_without_experts_have_no_coverage(tmp_path: Path, states: torch.Tensor) -> None:
    spec = resolve(make_tiny("llama", tmp_path / "model"))
    tensors = CanonicalTensors(spec)
    mlp = build_sublayer(spec, spec.sublayers[1], tensors, dtype=torch.float32, device="cpu")

    assert Coverage.of(mlp, states, 0) is None


def test_the_least_number_of_tokens_is_that_of_in_features(
    sublayer: ExpertsSublayer, states: torch.Tensor
) -> None:
    assert coverage_of(sublayer, states, 0).least == HIDDEN


def test_an_expert_gets_the_tokens_that_nearly_chose_it(
    sublayer: ExpertsSublayer, states: torch.Tensor
) -> None:
    least = 50
    coverage = coverage_of(sublayer, states, least)

    near, ids = sublayer.nearly_chosen(states), sublayer.routes(states).ids
    few = [expert for expert, count in coverage.counts.items() if count < least]
    assert few
    assert [*coverage.added] == few
    for expert in few:
        places, weights = coverage.added[expert]
        wanted = least - coverage.counts[expert]
        assert len(places) == wanted
        assert torch.equal(places, places.sort().values)
        assert not (ids[places] == expert).any()
        assert torch.equal(weights, near[places, expert])
        assert set(weights.tolist()) == set(near[:, expert].topk(wanted).values.tolist())
        assert 0 < float(weights.min()) <= float(weights.max()) <= 1


def test_hessians_of_few_tokens_are_mixed_with_those_of_the_layer(
    sublayer: ExpertsSublayer, states: torch.Tensor
) -> None:
    coverage = coverage_of(sublayer, states, 50)

    hessians, _ = collect_hessians(sublayer, states, coverage=coverage)

    x, reads = sublayer.inputs(states), sublayer.reads(states)
    step = ALL // min(ALL, SAMPLE * INNER)
    for expert in range(EXPERTS):
        own, count = reads[f"{expert}.input"], coverage.counts[expert]
        places, weights = coverage.added.get(expert, (torch.empty(0).long(), torch.empty(0)))
        tokens = torch.cat([own, x[places]])
        by = torch.cat([torch.ones(count), weights])
        pairs = {
            f"{expert}.input": (tokens, x, HIDDEN),
            f"{expert}.inner": (
                sublayer.inner(expert, tokens),
                sublayer.inner(expert, x[::step]),
                INNER,
            ),
        }
        for capture, (mine, others, k) in pairs.items():
            share = count / (count + k) if expert in coverage.added else 1.0
            expected = share * mean(mine, by) + (1 - share) * mean(others)
            torch.testing.assert_close(hessians[capture].double(), expected, rtol=1e-4, atol=1e-6)
    assert set(hessians) == set(reads)


def test_an_expert_that_is_never_chosen_has_the_hessians_of_its_layer(
    sublayer: ExpertsSublayer, states: torch.Tensor
) -> None:
    starve(sublayer, 2)
    coverage = coverage_of(sublayer, states, 0)

    hessians, _ = collect_hessians(sublayer, states, coverage=coverage)

    assert coverage.counts[2] == 0
    assert 2 in coverage.report().topped_up
    expected = mean(sublayer.inputs(states))
    torch.testing.assert_close(hessians["2.input"].double(), expected, rtol=1e-4, atol=1e-6)
    assert float(torch.linalg.eigvalsh(hessians["2.input"]).min()) > 0
