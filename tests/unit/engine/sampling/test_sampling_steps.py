"""Each step of the sampler alone, on eight tokens, against values worked out with numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampled import PLAIN, distribution, reference, sample, sampled, slots_of

from exl2flow.engine.sampling import Kind, SamplingSettings
from exl2flow.engine.sampling import sample as sample_rows

EIGHT = np.array([0.05, 0.10, 0.15, 0.02, 0.20, 0.25, 0.13, 0.10])
ORDER = [5, 4, 2, 6, 1, 7, 0, 3]
LOGITS = torch.from_numpy(np.log(EIGHT)).float()
FALLING = EIGHT[ORDER]
ROUNDED = 4 * torch.finfo(torch.float32).eps  # two logits below 4, each rounded twice
ENTROPY = -(EIGHT * np.log(EIGHT)).sum()


def check(settings: SamplingSettings, weights: dict[int, float]) -> None:
    """Check the final distribution: id → weight, in order."""
    found = distribution(LOGITS, settings)
    expected = np.array([*weights.values()]) / sum(weights.values())
    assert list(found) == list(weights)
    np.testing.assert_allclose([*found.values()], expected, rtol=1e-6)  # fp32 logits


def powers(exponent: float) -> dict[int, float]:
    return {i: EIGHT[i] ** exponent for i in ORDER}


def first(count: int) -> dict[int, float]:
    return {i: EIGHT[i] for i in ORDER[:count]}


def test_nothing_on_leaves_the_softmax() -> None:
    check(PLAIN, first(8))


def test_temperature_divides_logits() -> None:
    check(replace(PLAIN, temperature=0.5), powers(2))
    check(replace(PLAIN, temperature=2.0), powers(0.5))


def test_smoothing_squares_distances() -> None:
    distance = np.log(EIGHT / 0.25)
    expected = {i: math.exp(-(distance[i] ** 2) * 0.3 / 1.5) for i in ORDER}

    check(replace(PLAIN, smoothing_factor=0.3, temperature=1.5), expected)


def test_top_k_keeps_the_likeliest() -> None:
    check(replace(PLAIN, top_k=3), first(3))
    check(replace(PLAIN, top_k=6), first(6))  # the lower of two equal ids comes first


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    check(replace(PLAIN, top_p=0.44), first(2))
    check(replace(PLAIN, top_p=0.46), first(3))
    half = distribution(torch.tensor([0.5, 0.3, 0.2]).log(), replace(PLAIN, top_p=0.75))
    assert list(half) == [0, 1]


def test_top_a_compares_with_the_squared_greatest() -> None:
    check(replace(PLAIN, top_a=2.0), first(4))  # 2 * 0.25^2 = 0.125
    check(replace(PLAIN, top_a=1.0), first(6))  # 0.0625
    check(replace(PLAIN, top_a=100.0), first(1))


def test_min_p_compares_with_the_greatest() -> None:
    check(replace(PLAIN, min_p=0.5), first(4))  # 0.125
    check(replace(PLAIN, min_p=1.0), first(1))


def test_tail_free_keeps_what_comes_before_the_curve_flattens() -> None:
    curve = np.abs(FALLING[:-2] - 2 * FALLING[1:-1] + FALLING[2:])
    shares = np.cumsum(curve) / curve.sum()

    for bound in (0.1, 0.3, 0.5, 0.9):
        check(replace(PLAIN, tfs=bound), first(int((shares <= bound).sum()) + 1))
    check(replace(PLAIN, tfs=0.1, top_k=2), first(2))


def test_typical_keeps_what_is_nearest_to_the_entropy() -> None:
    nearest = sorted(ORDER, key=lambda i: abs(-math.log(EIGHT[i]) - ENTROPY))
    assert nearest[:3] == [2, 6, 4]  # ln 0.15 is nearest to the entropy, 1.905

    check(replace(PLAIN, typical=0.15), {2: 0.15, 6: 0.13})
    check(replace(PLAIN, typical=0.45), {4: 0.2, 2: 0.15, 6: 0.13})
    check(replace(PLAIN, typical=0.99), first(8))


def test_mirostat_drops_surprises_above_its_bound() -> None:
    settings = replace(PLAIN, mirostat=True, mirostat_tau=1.5)  # mu is 3: 2^-3 = 0.125

    check(settings, first(4))
    check(replace(settings, mirostat_tau=0.5), first(1))


def test_late_temperature_comes_after_truncation() -> None:
    settings = replace(PLAIN, temperature=2.0, temperature_last=True, top_p=0.55)

    check(settings, {i: EIGHT[i] ** 0.5 for i in ORDER[:3]})


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_dynamic_temperature_follows_the_entropy(exponent: float) -> None:
    settings = replace(PLAIN, min_temp=0.5, max_temp=2.0, temp_exponent=exponent)
    heat = 0.5 + 1.5 * (ENTROPY / math.log(8)) ** exponent

    check(settings, powers(1 / heat))
    check(replace(settings, temperature=9.0, temperature_last=True), powers(1 / heat))


def test_dynamic_temperature_ends_at_its_bounds() -> None:
    settings = replace(PLAIN, min_temp=0.5, max_temp=2.0)
    flat = distribution(torch.tensor([1.0, 1.0, -80.0]), replace(settings, top_k=2))
    sharp = distribution(torch.tensor([50.0, 0.0, 1.0]), settings)

    assert flat == {0: 0.5, 1: 0.5}
    rounded = torch.finfo(torch.float32).eps / 2 * 49 / 0.5  # of the exponent
    assert sharp[2] == pytest.approx(math.exp(-49 / 0.5), rel=rounded)


def test_xtc_is_the_expected_outcome_of_a_coin() -> None:
    settings = replace(PLAIN, xtc_probability=0.3, xtc_threshold=0.12)
    rng, counts = np.random.default_rng(0), np.zeros(8)
    for heads in rng.random(20_000) < 0.3:
        left = np.where((EIGHT >= 0.12) & (EIGHT != 0.13), 0, EIGHT) if heads else EIGHT
        counts += left / left.sum()

    found = distribution(LOGITS, settings)

    assert list(found)[:2] == [6, 5]  # 0.13 gains most
    assert sum(found.values()) == pytest.approx(1)
    np.testing.assert_allclose([found[i] for i in range(8)], counts / 20_000, rtol=0.05)
    check(settings, reference(LOGITS, settings))


def test_xtc_leaves_ignored_tokens_and_a_single_likely_one_alone() -> None:
    check(replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.21), first(8))
    settings = replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.14)
    found = distribution(LOGITS, replace(settings, xtc_ignored=(5,)))
    assert 4 not in found
    assert found[5] == pytest.approx(0.25 / 0.8)
    check(replace(settings, xtc_ignored=()), {i: EIGHT[i] for i in ORDER[2:]})


def test_positive_skew_favours_less_likely_tokens() -> None:
    draws = np.random.default_rng(0).random(300)
    places = [
        np.mean([ORDER.index(sample(LOGITS, replace(PLAIN, skew=skew), draw)) for draw in draws])
        for skew in (-700.0, -1.0, 0.0, 1.0, 700.0)
    ]

    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, 7)  # always the likeliest, always the least likely


def seen(logits: torch.Tensor, settings: SamplingSettings, history: list[int]) -> np.ndarray:
    """Return logits after penalties, up to a common constant, from the final distribution."""
    found = distribution(logits, settings, history)
    return np.log([found[i] for i in range(len(logits))])


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.0, 0.5])

    found = seen(logits, replace(PLAIN, repetition_penalty=2.0), [0, 0, 1, 4, 1, 0, 99, -1])

    np.testing.assert_allclose(found - found[2] + 1, [1, -4, 1, -1, 0, 0.5], rtol=0, atol=ROUNDED)


def test_presence_counts_once_and_frequency_every_time() -> None:
    logits = torch.zeros(4)
    history = [0, 0, 1, 0]

    present = seen(logits, replace(PLAIN, presence_penalty=0.5), history)
    frequent = seen(logits, replace(PLAIN, frequency_penalty=0.5), history)

    np.testing.assert_allclose(present - present[3], [-0.5, -0.5, 0, 0], rtol=0, atol=ROUNDED)
    np.testing.assert_allclose(frequent - frequent[3], [-1.5, -0.5, 0, 0], rtol=0, atol=ROUNDED)


def test_penalties_fade_linearly_beyond_their_range() -> None:
    """Range 2, decay 4: one step per token, the oldest has no effect."""
    settings = replace(PLAIN, presence_penalty=1.0, repetition_range=2, repetition_decay=4)

    found = seen(torch.zeros(9), settings, [0, 1, 2, 3, 4, 5, 6, 7])

    fading = [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, 0]
    np.testing.assert_allclose(found - found[8], fading, rtol=0, atol=ROUNDED)


def test_repetition_counts_as_its_newest_token_does() -> None:
    settings = replace(
        PLAIN, repetition_penalty=3.0, frequency_penalty=1.0, repetition_range=1, repetition_decay=2
    )

    found = seen(torch.ones(3), settings, [0, 1, 0, 1])

    expected = [1 / 2 - 0.5, 1 / 3 - 1 - 0, 1]  # token 0: one step of two; token 1: full, then none
    np.testing.assert_allclose(found - found[2] + 1, expected, rtol=0, atol=ROUNDED)


def dry(history: list[int], **options) -> list[float]:
    """Return what DRY subtracts from each of ten tokens."""
    settings = replace(PLAIN, **{"dry_multiplier": 1.0, "dry_base": 2.0, **options})
    found = distribution(torch.zeros(10), settings, history)
    logs = np.log([found[i] for i in range(10)])
    return [round(float(x), 4) + 0.0 for x in logs.max() - logs]


def test_dry_grows_with_the_repetition() -> None:
    for length in range(2, 6):
        history = [*range(6), 9, *range(6 - length, 6)]
        assert dry(history) == [0] * 9 + [2.0 ** (length - 2)]
    assert dry([4, 5, 9, 5]) == [0] * 10  # shorter than allowed
    assert dry([4, 5, 9, 5], dry_allowed_length=1) == [0] * 9 + [1]


def test_dry_counts_how_often_a_token_followed() -> None:
    history = [1, 2, 7, 0, 1, 2, 8, 3, 1, 2, 7, 4, 1, 2]

    assert dry(history) == [0] * 7 + [2, 1, 0]
    assert dry(history, dry_counts=False) == [0] * 7 + [1, 1, 0]


def test_dry_looks_at_the_longest_repetition_only() -> None:
    assert dry([2, 3, 8, 1, 2, 3, 7, 1, 2, 3]) == [0] * 7 + [2, 0, 0]
    assert dry([2, 3, 8, 1, 2, 3, 7, 1, 2, 3], dry_max_ngram=2) == [0] * 7 + [1, 1, 0]


def test_dry_stops_at_breakers() -> None:
    history = [1, 2, 3, 7, 1, 2, 3]

    assert dry(history) == [0] * 7 + [2, 0, 0]
    assert dry(history, dry_breakers=(1,)) == [0] * 7 + [1, 0, 0]
    assert dry(history, dry_breakers=(2,)) == [0] * 10
    assert dry(history, dry_breakers=(7,)) == [0] * 10  # breakers may always follow


def test_dry_searches_its_range_only() -> None:
    history = [1, 2, 7, 4, 1, 2]

    assert dry(history, dry_range=6, dry_max_ngram=3) == [0] * 7 + [1, 0, 0]
    assert dry(history, dry_range=5, dry_max_ngram=3) == [0] * 10
    assert dry([]) == dry([1]) == dry([1, 1]) == [0] * 10
    assert dry([1, 1, 1]) == [0, 1] + [0] * 8  # a repetition may overlap itself


def test_bias_is_added_and_excludes() -> None:
    settings = replace(PLAIN, token_bias=((0, math.log(2)), (5, -math.inf), (0, math.log(2))))

    check(settings, {i: EIGHT[i] * (4 if i == 0 else 1) for i in (0, 4, 2, 6, 1, 7, 3)})


@pytest.mark.parametrize("kind", [Kind(most=1, masked=True), Kind(most=64, masked=True)], ids=str)
def test_masks_restrict_ids_until_they_are_lifted(kind: Kind) -> None:
    logits = torch.arange(70.0).expand(2, -1)
    slots = slots_of([SamplingSettings.greedy()] * 2, 70)
    draws = torch.zeros(2, dtype=torch.float64)

    slots.allow({0: torch.tensor([1 << 7, -(2**31), 0], dtype=torch.int32)})
    assert sample_rows(logits, slots, draws, kind).ids.tolist() == [63, 69]
    slots.allow({0: torch.tensor([1 << 7, 0, 0], dtype=torch.int32)})
    assert sample_rows(logits, slots, draws, kind).ids.tolist() == [7, 69]
    slots.allow({0: torch.zeros(3, dtype=torch.int32)})
    assert sample_rows(logits, slots, draws, kind).ids.tolist() == [-1, 69]
    slots.allow({0: None})
    assert sample_rows(logits, slots, draws, kind).ids.tolist() == [69, 69]


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5])
def test_cfg_mixes_the_logits_of_two_slots(scale: float) -> None:
    settings = replace(PLAIN, cfg_scale=scale)
    logits = torch.randn(3, 40) * 2
    logits[1, 3] = -math.inf
    mix = torch.log_softmax(logits[0], -1) * scale
    if scale != 1:
        mix = mix + torch.log_softmax(logits[1], -1) * (1 - scale)
    mix[3] = -math.inf if scale < 1 else mix[3]
    expected = torch.softmax(mix.double(), -1)
    slots = slots_of([settings] * 3, 40)
    slots.pair(0, 1)
    kind = Kind.of([settings], top=64, probabilities=True)

    draws = torch.tensor([0.4, 0.9, 0.4], dtype=torch.float64)
    found = sample_rows(logits, slots, draws, kind)

    shares = torch.zeros(40, dtype=torch.float64).scatter(
        0, found.top_ids[0], found.top_probabilities[0]
    )
    if scale <= 1:
        torch.testing.assert_close(shares, expected, rtol=1e-4, atol=1e-9)
    else:
        assert found.ids[0] == 3  # excluded by the second prompt alone: the difference is infinite
    assert found.ids[0] == found.ids[1]
    alone = sample_rows(logits[2:], slots_of([PLAIN], 40), draws[2:], Kind(most=None))
    assert found.ids[2] == alone.ids[0]


def test_mirostat_follows_the_surprise_of_its_picks() -> None:
    tau, eta, mu = 2.0, 0.25, 4.0
    settings = replace(PLAIN, mirostat=True, mirostat_tau=tau, mirostat_eta=eta)
    slots = slots_of([settings, PLAIN], 8)
    kind = Kind.of([settings, PLAIN])

    for draw in (0.1, 0.95, 0.5, 0.99, 0.7):
        draws = torch.full((2,), draw, dtype=torch.float64)
        token = int(sample_rows(LOGITS.expand(2, -1), slots, draws, kind).ids[0])
        mu += eta * (tau + math.log2(reference(LOGITS, settings, mu=mu)[token]))
        assert slots.mu.tolist() == pytest.approx([mu, math.inf], rel=1e-6)


NEUTRAL = {
    "smoothing_factor": 0.0,
    "min_temp": 0.5,
    "temp_exponent": 3.0,
    "top_k": 8,
    "top_p": 1.0,
    "tfs": 1.0,
    "typical": 1.0,
    "temperature_last": True,
    "repetition_decay": 5,
    "repetition_range": 3,
    "mirostat_tau": 9.0,
    "dry_base": 1e300,
    "xtc_threshold": 0.01,
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_disabled_steps_change_nothing(field: str) -> None:
    """The steps are launched for other rows of the batch, and leave this one bit by bit."""
    settings = replace(PLAIN, **{field: NEUTRAL[field]})
    other = replace(PLAIN, typical=0.5, repetition_penalty=2.0, dry_multiplier=1.0)
    draws = torch.rand(2, dtype=torch.float64)
    history = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    kind = Kind.of([other], top=8, probabilities=True)
    slots = slots_of([settings, other], 8, histories=[history, history])

    found = sample_rows(LOGITS.expand(2, -1), slots, draws, kind)

    plain = sampled(LOGITS, PLAIN, float(draws[0]))
    assert found.ids[0] == plain.ids[0]
    assert torch.equal(found.top_ids[0], plain.top_ids[0])
    assert torch.equal(found.top_probabilities[0], plain.top_probabilities[0])
