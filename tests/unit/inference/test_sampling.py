"""The sampler's steps against naive numpy, and its settings."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from sampled import candidates, sample

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.inference.sampling import SamplerRows, SamplingSettings
from exl2flow.inference.sampling import sample as sample_rows
from exl2flow.inference.sampling.chain import NOT_FINITE, RUN, running_sums

GREEDY = SamplingSettings.greedy()
PLAIN = SamplingSettings(temperature=1.0, top_k=0, top_p=0.0, min_p=0.0)
MIXED = (
    PLAIN,
    GREEDY,
    SamplingSettings(),
    SamplingSettings(temperature=2.5, top_k=0, top_p=0.9),
    SamplingSettings(temperature=0.0),
    SamplingSettings(top_k=7, min_p=0.1),
)
LAST_DRAW = 1 - 2**-53  # the greatest below 1


def naive(logits: np.ndarray, settings: SamplingSettings) -> dict[int, float]:
    """Return id → probability of the tokens kept, step by step as the settings define it."""
    scaled = logits.astype(np.float64) / settings.temperature
    weights = np.exp(scaled - scaled.max())
    probability = dict(enumerate(weights / weights.sum()))
    order = sorted(probability, key=lambda i: (-probability[i], i))
    if settings.top_k:
        order = order[: settings.top_k]
    for threshold, kind in ((settings.top_p, "top_p"), (settings.min_p, "min_p")):
        total = sum(probability[i] for i in order)
        probability = {i: probability[i] / total for i in order}
        kept: list[int] = []
        mass = 0.0
        for i in order:
            if kind == "top_p" and 0 < threshold < 1 and mass >= threshold:
                break
            if kind == "min_p" and probability[i] < threshold * probability[order[0]]:
                break
            kept.append(i)
            mass += probability[i]
        order = kept
    total = sum(probability[i] for i in order)
    return {i: probability[i] / total for i in order}


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        SamplingSettings(),
        SamplingSettings(temperature=0.3, top_k=0, top_p=0.0),
        SamplingSettings(temperature=2.5, top_k=0, top_p=0.0),
        SamplingSettings(temperature=1.0, top_k=7, top_p=0.0),
        SamplingSettings(temperature=1.0, top_k=1000, top_p=1.0),
        SamplingSettings(temperature=1.0, top_k=0, top_p=0.5),
        SamplingSettings(temperature=1.0, top_k=0, top_p=0.999),
        SamplingSettings(temperature=1.0, top_k=0, top_p=0.0, min_p=0.1),
        SamplingSettings(temperature=1.0, top_k=0, top_p=0.0, min_p=1.0),
        SamplingSettings(temperature=1.3, top_k=40, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [200, 1500])
def test_steps_are_those_of_naive_numpy(settings: SamplingSettings, vocab: int) -> None:
    for _ in range(20):
        logits = torch.randn(vocab) * 3

        ids, probabilities = candidates(logits, settings)

        expected = naive(logits.numpy(), settings)
        assert ids.tolist() == list(expected)
        np.testing.assert_allclose(probabilities.numpy(), list(expected.values()), rtol=1e-9)


def test_equal_logits_are_ordered_by_id() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])

    ids, _ = candidates(logits, PLAIN)

    assert ids.tolist() == [1, 3, 0, 2, 4]
    assert candidates(torch.zeros(5000), PLAIN)[0].tolist() == list(range(5000))


def test_draw_walks_through_the_cumulated_probabilities() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log()

    tokens = [sample(logits, PLAIN, draw) for draw in (0.0, 0.49, 0.51, 0.79, 0.81, LAST_DRAW)]

    assert tokens == [1, 1, 2, 2, 0, 0]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    generator = random.Random(0)

    counts = Counter(sample(logits, PLAIN, generator.random()) for _ in range(4000))

    for token, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        deviation = math.sqrt(4000 * share * (1 - share))
        assert abs(counts[token] - 4000 * share) < 4 * deviation


def test_impossible_tokens_are_never_drawn() -> None:
    """Rounded probabilities may sum to less than the greatest draw."""
    generator = torch.Generator()
    for seed in range(40):
        logits = torch.randn(50, generator=generator.manual_seed(seed))
        logits = torch.cat([logits, torch.full((5,), -math.inf)])

        assert sample(logits, PLAIN, LAST_DRAW) < 50
        assert sorted(candidates(logits, PLAIN)[0].tolist()) == list(range(50))


def test_half_precision_logits_are_sampled_in_double() -> None:
    logits = (torch.randn(100) * 3).half()

    for dtype in (torch.float16, torch.float32):
        ids, probabilities = candidates(logits.to(dtype), PLAIN)

        assert probabilities.dtype == torch.float64
        assert ids.tolist() == candidates(logits.double(), PLAIN)[0].tolist()


@pytest.mark.parametrize(
    "settings",
    [SamplingSettings.greedy(), SamplingSettings(temperature=0.0), SamplingSettings(top_k=1)],
)
def test_greedy_settings_always_take_the_likeliest(settings: SamplingSettings) -> None:
    logits = torch.randn(50)

    assert {sample(logits, settings, draw) for draw in (0.0, 0.5, LAST_DRAW)} == {
        int(logits.argmax())
    }


@pytest.mark.parametrize("settings", [PLAIN, SamplingSettings.greedy()], ids=("plain", "greedy"))
@pytest.mark.parametrize("logits", [[0.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf]])
def test_logits_that_are_not_finite_are_refused(
    logits: list[float], settings: SamplingSettings
) -> None:
    with pytest.raises(InferenceError, match="the logits are not finite"):
        sample(torch.tensor(logits), settings, 0.5)


@pytest.mark.parametrize("vocab", [50, 3 * RUN + 1])
def test_rows_of_a_batch_are_sampled_as_they_are_alone(vocab: int) -> None:
    for _ in range(10):
        logits = (torch.randn(len(MIXED), vocab) * 2).half().float()  # rounded: some are equal
        draws = torch.rand(len(MIXED), dtype=torch.float64)

        ids = sample_rows(logits, SamplerRows.of(MIXED), draws)

        alone = [sample(*row) for row in zip(logits, MIXED, draws.tolist(), strict=True)]
        assert ids.tolist() == alone


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    logits = torch.randn(len(MIXED), 50)
    draws = torch.full((len(MIXED),), 0.5, dtype=torch.float64)
    expected = sample_rows(logits, SamplerRows.of(MIXED), draws)
    logits[1, 3], logits[3, 7], logits[5] = math.nan, math.inf, -math.inf

    found = sample_rows(logits, SamplerRows.of(MIXED), draws)

    expected[1::2] = NOT_FINITE
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("settings", [MIXED, [GREEDY] * len(MIXED)], ids=("mixed", "greedy"))
def test_nothing_is_asked_of_the_device(settings: list[SamplingSettings]) -> None:
    """Meta tensors have no values to read."""
    logits = torch.empty(len(MIXED), 3 * RUN + 1, device="meta")
    draws = torch.empty(len(MIXED), dtype=torch.float64, device="meta")

    ids = sample_rows(logits, SamplerRows.of(settings, "meta"), draws)

    assert (ids.shape, ids.dtype) == ((len(MIXED),), torch.int64)


@pytest.mark.parametrize("count", [1, RUN, RUN + 1, 5 * RUN])
def test_running_sums_add_up_to_each_place(count: int) -> None:
    x = torch.rand(3, count, dtype=torch.float64)

    torch.testing.assert_close(running_sums(x), x.cumsum(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ([GREEDY, SamplingSettings(temperature=0.0)], 1),
        ([GREEDY, SamplingSettings(top_k=2)], 64),
        ([SamplingSettings(top_k=64), SamplingSettings(top_k=65)], 128),
        ([GREEDY, SamplingSettings(top_k=0)], None),
        ([SamplingSettings(top_k=2**40)], None),
    ],
)
def test_settings_tell_how_many_candidates_matter(
    settings: list[SamplingSettings], most: int | None
) -> None:
    assert SamplerRows.of(settings).most == most


def test_any_temperature_leaves_impossible_tokens_out() -> None:
    logits = torch.tensor([-math.inf, 1.0, 2.0])
    settings = SamplingSettings(temperature=math.inf, top_k=0, top_p=0.0)

    assert sample(logits, settings, 0.0) == 2
    assert sample(logits, settings, LAST_DRAW) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 1.01),
        ("min_p", -0.5),
        ("temperature", math.nan),
        ("min_p", math.nan),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"`{field}` is {value}; it must be"):
        SamplingSettings(**{field: value})
