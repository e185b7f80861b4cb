"""What the sampler keeps is a distribution, whatever the logits and settings."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled import PLAIN, distribution, sample, sampled

from exl2flow.engine.sampling import SamplingSettings

SHARES = st.floats(0, 1)
STEPS = {
    "smoothing_factor": st.floats(0, 2),
    "top_k": st.integers(0, 40),
    "top_p": SHARES,
    "top_a": st.floats(0, 3),
    "min_p": SHARES,
    "tfs": SHARES,
    "typical": SHARES,
    "max_temp": st.floats(0, 3),
    "temp_exponent": st.floats(0, 3),
    "xtc_probability": SHARES,
    "xtc_threshold": SHARES,
    "skew": st.floats(-3, 3),
    "mirostat": st.booleans(),
    "mirostat_tau": st.floats(0, 5),
    "temperature_last": st.booleans(),
    "repetition_penalty": st.floats(0.5, 2),
    "repetition_range": st.integers(-1, 8),
    "repetition_decay": st.integers(0, 8),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "dry_multiplier": st.floats(0, 2),
    "dry_base": st.floats(0, 3),
    "dry_allowed_length": st.integers(1, 3),
}
ANY = st.builds(SamplingSettings, temperature=st.floats(0, 3), **STEPS)
FLOATS = st.floats(-60, 60, width=32) | st.just(-math.inf)
LOGITS = st.lists(FLOATS, min_size=1, max_size=60).filter(lambda x: max(x) > -math.inf)
HISTORIES = st.lists(st.integers(0, 5), max_size=20)
DRAWS = st.floats(0, 1, exclude_max=True)
TRUNCATING = ("top_k", "top_p", "top_a", "min_p", "tfs", "typical")


@given(logits=LOGITS, settings=ANY, history=HISTORIES, draw=DRAWS)
def test_candidates_are_a_falling_distribution(
    logits: list[float], settings: SamplingSettings, history: list[int], draw: float
) -> None:
    kept = distribution(torch.tensor(logits), settings, history)
    found = sampled(torch.tensor(logits), settings, draw, history)

    probabilities = torch.tensor([*kept.values()])
    assert math.isclose(float(probabilities.sum()), 1.0, abs_tol=1e-6)
    assert (probabilities.diff() <= 0).all()
    assert all(logits[token] > -math.inf for token in kept)
    assert float(found.probabilities) == kept[int(found.ids)] > 0
    if settings.top_k:
        assert len(kept) <= settings.top_k


@pytest.mark.parametrize("step", TRUNCATING)
def test_a_step_that_drops_candidates_keeps_proportions(step: str) -> None:
    @given(logits=LOGITS, value=STEPS[step])
    def holds(logits: list[float], value: float) -> None:
        everything = distribution(torch.tensor(logits), PLAIN)
        kept = distribution(torch.tensor(logits), replace(PLAIN, **{step: value}))

        assert list(kept) == [token for token in everything if token in kept]
        mass = sum(everything[token] for token in kept)
        for token, probability in kept.items():
            assert math.isclose(probability, everything[token] / mass, rel_tol=1e-9)

    holds()


@given(logits=LOGITS, first=SHARES, second=SHARES)
def test_greater_bounds_keep_more_of_top_p_and_typical(
    logits: list[float], first: float, second: float
) -> None:
    low, high = sorted(x or 1e-3 for x in (first, second))
    for step in ("top_p", "typical"):
        few, many = (
            distribution(torch.tensor(logits), replace(PLAIN, **{step: x})) for x in (low, high)
        )
        assert set(few) <= set(many)


@given(logits=LOGITS, probability=SHARES, threshold=st.floats(0.01, 1))
def test_xtc_moves_mass_from_likely_to_unlikely_tokens(
    logits: list[float], probability: float, threshold: float
) -> None:
    before = distribution(torch.tensor(logits), PLAIN)
    settings = replace(PLAIN, xtc_probability=probability, xtc_threshold=threshold)
    after = distribution(torch.tensor(logits), settings)

    [*likely, _] = [i for i, x in before.items() if x >= threshold] or [None]
    for token, x in before.items():
        if token in likely:
            assert math.isclose(after.get(token, 0.0), x * (1 - probability), abs_tol=1e-12)
        else:
            assert after[token] >= x * (1 - 1e-9)


@given(logits=LOGITS, history=HISTORIES, penalty=st.floats(1, 3))
def test_penalties_never_make_a_seen_token_likelier(
    logits: list[float], history: list[int], penalty: float
) -> None:
    before = distribution(torch.tensor(logits), PLAIN)
    for change in (
        {"repetition_penalty": penalty},
        {"frequency_penalty": penalty},
        {"presence_penalty": penalty},
        {"dry_multiplier": penalty, "dry_allowed_length": 1},
    ):
        after = distribution(torch.tensor(logits), replace(PLAIN, **change), history)
        for token in set(before) - set(history):
            assert after[token] >= before[token] * (1 - 1e-6)


@given(logits=LOGITS, draw=DRAWS)
def test_without_a_token_that_was_not_drawn_the_draw_is_the_same(
    logits: list[float], draw: float
) -> None:
    token = sample(torch.tensor(logits), PLAIN, draw)

    for other in range(len(logits)):
        left = torch.tensor(logits)
        left[other] = -math.inf
        assert other == token or sample(left, PLAIN, draw) == token


@given(logits=LOGITS, settings=ANY, draw=DRAWS)
def test_what_is_drawn_was_possible(
    logits: list[float], settings: SamplingSettings, draw: float
) -> None:
    possible = distribution(torch.tensor(logits), settings)

    assert sample(torch.tensor(logits), settings, draw) in possible


@given(logits=LOGITS, draw=DRAWS)
def test_greedy_takes_the_first_of_the_likeliest(logits: list[float], draw: float) -> None:
    expected = logits.index(max(logits))

    for settings in (SamplingSettings.greedy(), SamplingSettings(temperature=0.0)):
        assert sample(torch.tensor(logits), settings, draw) == expected
