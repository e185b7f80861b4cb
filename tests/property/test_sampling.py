"""What the sampler keeps is a distribution, whatever the logits and settings."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled import candidates, sample

from exl2flow.inference.sampling import SamplingSettings

ANY = st.builds(
    SamplingSettings,
    temperature=st.floats(0, 3),
    top_k=st.integers(0, 40),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
)
LOGITS = st.lists(
    st.floats(-60, 60, width=32) | st.just(-math.inf), min_size=1, max_size=60
).filter(lambda values: max(values) > -math.inf)
DRAWS = st.floats(0, 1, exclude_max=True)


@given(logits=LOGITS, settings=ANY)
def test_candidates_are_a_falling_distribution(
    logits: list[float], settings: SamplingSettings
) -> None:
    ids, probabilities = candidates(torch.tensor(logits), settings)

    assert len(ids) == len(probabilities) == len(set(ids.tolist())) >= 1
    assert math.isclose(float(probabilities.sum()), 1.0, abs_tol=1e-9)
    assert (probabilities >= 0).all()
    assert (probabilities.diff() <= 0).all()
    kept = [logits[i] for i in ids.tolist()]
    assert kept[0] == max(logits)
    assert kept == sorted(kept, reverse=True)
    if settings.top_k:
        assert len(ids) <= settings.top_k


@given(logits=LOGITS, settings=ANY, draw=DRAWS)
def test_sample_is_a_possible_token(
    logits: list[float], settings: SamplingSettings, draw: float
) -> None:
    token = sample(torch.tensor(logits), settings, draw)

    assert logits[token] > -math.inf
    assert token in candidates(torch.tensor(logits), settings)[0].tolist()
    assert sample(torch.tensor(logits), settings, draw) == token


@given(logits=LOGITS, settings=ANY, draws=st.tuples(DRAWS, DRAWS))
def test_greater_draws_give_less_likely_tokens(
    logits: list[float], settings: SamplingSettings, draws: tuple[float, float]
) -> None:
    ids = candidates(torch.tensor(logits), settings)[0].tolist()

    first, second = (
        ids.index(sample(torch.tensor(logits), settings, draw)) for draw in sorted(draws)
    )

    assert first <= second


@given(logits=LOGITS, draw=DRAWS)
def test_greedy_takes_the_first_of_the_likeliest(logits: list[float], draw: float) -> None:
    expected = logits.index(max(logits))

    for settings in (SamplingSettings.greedy(), SamplingSettings(temperature=0.0)):
        assert sample(torch.tensor(logits), settings, draw) == expected
