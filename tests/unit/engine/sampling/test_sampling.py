"""The sampler as a whole: order, draws, rows, kinds, and its settings."""

import math
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from sampled import PLAIN, distribution, reference, sample, sampled, slots_of
from spelled import EOS, spelled
from torch._subclasses.fake_tensor import FakeTensorMode

from exl2flow.core.errors import ConfigError, InferenceError
from exl2flow.engine.sampling import Kind, SamplingSettings
from exl2flow.engine.sampling import sample as sample_rows
from exl2flow.engine.sampling.bits import breakers, newline_ids
from exl2flow.kernels import NOT_FINITE

GREEDY = SamplingSettings.greedy()
EVERY = SamplingSettings(
    temperature=1.3,
    temperature_last=True,
    smoothing_factor=0.3,
    top_k=0,
    top_p=0.95,
    top_a=0.01,
    min_p=0.01,
    tfs=0.98,
    typical=0.9,
    skew=0.2,
    repetition_penalty=1.2,
    repetition_range=6,
    repetition_decay=4,
    frequency_penalty=0.1,
    presence_penalty=0.2,
    mirostat=True,
    mirostat_tau=4.0,
    token_bias=((2, 0.5), (3, -math.inf)),
    dry_multiplier=0.8,
    dry_allowed_length=1,
    xtc_probability=0.4,
    xtc_threshold=0.05,
)
MIXED = (
    PLAIN,
    GREEDY,
    SamplingSettings(),
    SamplingSettings(temperature=2.5, top_k=0, top_p=0.9),
    SamplingSettings(temperature=0.0),
    SamplingSettings(top_k=7, min_p=0.1),
    EVERY,
)
LAST_DRAW = 1 - 2**-53  # the greatest below 1


def drawn_settings(rng: random.Random) -> SamplingSettings:
    """Return settings in which each step is on about every third time."""

    def on(low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.35 else 0.0

    return SamplingSettings(
        temperature=rng.choice([0.0, 0.7, 1.0, rng.uniform(0.2, 3)]),
        temperature_last=rng.random() < 0.3,
        smoothing_factor=on(0.05, 0.5),
        min_temp=0.5 if rng.random() < 0.3 else 0.0,
        max_temp=on(0.3, 2),
        temp_exponent=rng.uniform(0.5, 2),
        top_k=rng.choice([0, 0, 5, 20]),
        top_p=on(0.3, 1),
        top_a=on(0, 0.3),
        min_p=on(0, 0.2),
        tfs=on(0.5, 1),
        typical=on(0.2, 1),
        repetition_penalty=1 + on(-0.3, 0.6),
        repetition_range=rng.choice([-1, 0, 3, 10]),
        repetition_decay=rng.choice([0, 0, 5]),
        frequency_penalty=on(-0.5, 0.5),
        presence_penalty=on(-0.5, 0.5),
        mirostat=rng.random() < 0.3,
        mirostat_tau=rng.uniform(0.5, 3),
        token_bias=((1, rng.uniform(-2, 2)), (4, -math.inf)) if rng.random() < 0.3 else (),
        dry_multiplier=on(0.2, 1),
        dry_allowed_length=rng.choice([1, 2]),
        dry_range=rng.choice([0, 0, 12]),
        dry_max_ngram=rng.choice([2, 5]),
        dry_counts=rng.random() < 0.5,
        dry_breakers=(0,),
        xtc_probability=on(0.1, 0.9),
        xtc_threshold=rng.uniform(0.02, 0.3),
        xtc_ignored=(2,),
    )


def test_the_whole_order_is_that_of_a_slow_sampler() -> None:
    rng = random.Random(12)
    for case in range(200):
        vocab = rng.choice((12, 100))
        settings = drawn_settings(rng)
        logits = torch.tensor([rng.gauss(0, 2) for _ in range(vocab)])
        history = [rng.randrange(5) for _ in range(rng.randrange(30))]

        found = distribution(logits, settings, history)

        expected = reference(logits, settings, history)
        assert list(found) == list(expected), (case, settings)
        np.testing.assert_allclose(
            [*found.values()], [*expected.values()], rtol=1e-5
        )  # fp32 logits


def test_equal_logits_are_ordered_by_id() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])

    assert list(distribution(logits, PLAIN)) == [1, 3, 0, 2, 4]
    assert list(distribution(torch.zeros(5000), PLAIN)) == list(range(5000))
    few = slots_of([PLAIN], 5000)
    signs = torch.zeros(1, 5000)
    signs[0, ::2] = -0.0
    kind = Kind(most=64, top=64)
    assert sample_rows(signs, few, torch.zeros(1), kind).top_ids.tolist() == [list(range(64))]


def skewed(expected: dict[int, float], skew: float) -> dict[int, float]:
    """Return probabilities in order, whose running sums are raised to a power."""
    sums = np.cumsum([0.0, *expected.values()]) ** math.exp(skew)
    return dict(zip(expected, np.diff(sums), strict=True))


@pytest.mark.parametrize("settings", [PLAIN, replace(EVERY, skew=-0.7)], ids=("plain", "all"))
@torch.inference_mode()
def test_tokens_are_drawn_as_often_as_they_are_likely(settings: SamplingSettings) -> None:
    """The statistic of 1e5 draws stays below the 99.9 % point of chi-square."""
    count, rows = 100_000, 1000
    logits = torch.tensor([0.05, 0.1, 0.15, 0.02, 0.2, 0.25, 0.13, 0.1]).log()
    settings = replace(settings, mirostat=False)
    slots = slots_of([settings] * rows, 8, room=8, histories=[[1, 2, 1]] * rows)
    generator, counts = torch.Generator().manual_seed(1), torch.zeros(8)
    kind = Kind.of([settings])

    for _ in range(count // rows):
        draws = torch.rand(rows, generator=generator, dtype=torch.float64)
        ids = sample_rows(logits.expand(rows, -1), slots, draws, kind).ids
        counts += torch.bincount(ids, minlength=8)
        slots.counts.fill_(3)  # back to the prompts
        slots.history[:, 3:] = 8

    expected = skewed(reference(logits, settings, [1, 2, 1]), settings.skew)
    assert counts[[i for i in range(8) if i not in expected]].sum() == 0
    statistic = sum((float(counts[i]) - count * p) ** 2 / (count * p) for i, p in expected.items())
    assert statistic < 24.32  # 7 degrees of freedom at most


def test_impossible_tokens_are_never_drawn() -> None:
    """Rounded probabilities may sum to less than the greatest draw."""
    generator = torch.Generator()
    for seed in range(20):
        logits = torch.randn(50, generator=generator.manual_seed(seed))
        logits = torch.cat([torch.full((5,), -math.inf), logits, torch.full((5,), -math.inf)])

        for settings in (PLAIN, replace(PLAIN, typical=0.5), replace(PLAIN, skew=9.0)):
            for draw in (0.0, LAST_DRAW):
                assert sample(logits, settings, draw) in distribution(logits, settings)
        assert sorted(distribution(logits, PLAIN)) == list(range(5, 55))


@pytest.mark.parametrize(
    "settings",
    [
        GREEDY,
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=0.001, temperature_last=True, top_k=0),
        SamplingSettings(top_k=1),
        SamplingSettings.greedy(mirostat=True, typical=0.5),
    ],
)
def test_greedy_settings_always_take_the_likeliest(settings: SamplingSettings) -> None:
    logits = torch.randn(50)

    assert {sample(logits, settings, draw) for draw in (0.0, 0.5, LAST_DRAW)} == {
        int(logits.argmax())
    }


@pytest.mark.parametrize("settings", MIXED, ids=range(len(MIXED)))
@pytest.mark.parametrize(
    "logits", [[0.0, math.nan], [0.0, -math.nan], [1.0, math.inf], [-math.inf, -math.inf]]
)
def test_logits_that_are_not_finite_give_no_token(
    logits: list[float], settings: SamplingSettings
) -> None:
    token = sample(torch.tensor(logits), replace(settings, token_bias=()), 0.5)

    assert token == NOT_FINITE


@pytest.mark.parametrize("vocab", [50, 385])
def test_rows_of_a_batch_are_sampled_as_they_are_alone(vocab: int) -> None:
    for seed in range(5):
        logits = (torch.randn(len(MIXED), vocab) * 2).half().float()  # rounded: some are equal
        draws = torch.rand(len(MIXED), dtype=torch.float64)
        histories = torch.randint(0, 4, (len(MIXED), 9 + seed)).tolist()
        slots = slots_of(MIXED, vocab, histories=histories)
        kind = Kind.of(MIXED, probabilities=True)

        together = sample_rows(logits, slots, draws, kind)

        for row, settings in enumerate(MIXED):
            own = slots_of([settings], vocab, histories=[histories[row]])
            one = slice(row, row + 1)
            kind = Kind.of([settings], probabilities=True)
            alone = sample_rows(logits[one], own, draws[one], kind)
            assert together.ids[one].tolist() == alone.ids.tolist()
            assert slots.mu[one].tolist() == own.mu.tolist()
            assert torch.equal(together.probabilities[one], alone.probabilities)


def test_equal_draws_give_equal_tokens_in_every_run() -> None:
    logits, runs = torch.randn(12, len(MIXED), 60), []
    for _ in range(2):
        slots, generator = slots_of(MIXED, 60), torch.Generator().manual_seed(3)
        draws = torch.rand(12, len(MIXED), generator=generator, dtype=torch.float64)
        kind = Kind.of(MIXED)
        runs.append([sample_rows(*x, kind).ids for x in zip(logits, [slots] * 12, draws)])  # noqa: B905

    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))


@pytest.mark.parametrize("masked", [False, True])
@torch.inference_mode()
def test_a_row_that_is_not_finite_leaves_the_others_alone(masked: bool) -> None:
    logits = torch.randn(len(MIXED), 50)
    draws = torch.full((len(MIXED),), 0.5, dtype=torch.float64)
    kind = Kind.of(MIXED, masked=masked)
    expected = sample_rows(logits, slots_of(MIXED, 50), draws, kind).ids
    logits[1, 3], logits[3, 7], logits[5] = math.nan, math.inf, -math.inf
    given, slots = logits.clone(), slots_of(MIXED, 50)

    found = sample_rows(logits, slots, draws, kind).ids

    expected[1:6:2] = NOT_FINITE
    assert found.tolist() == expected.tolist()
    assert sample_rows(torch.zeros(len(MIXED), 50), slots, draws, kind).ids.min() >= 0
    torch.testing.assert_close(logits, given, equal_nan=True)


def test_logits_are_kept() -> None:
    logits = torch.randn(len(MIXED), 50)
    given, slots = logits.clone(), slots_of(MIXED, 50, histories=[[1, 2, 1]] * len(MIXED))
    slots.allow({0: torch.tensor([6, 0], dtype=torch.int32)})

    sample_rows(logits, slots, torch.rand(len(MIXED)), Kind.of(MIXED, masked=True))

    assert torch.equal(logits, given)


def test_ids_beyond_the_vocabulary_are_never_sampled() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 60:] = torch.tensor([9.0, math.nan, math.inf, 9.0])
    slots = slots_of([PLAIN], 64)
    slots.vocab_size = 60

    for kind in (Kind(most=1), Kind(most=64), Kind(most=None)):
        for draw in (0.0, LAST_DRAW):
            ids = sample_rows(logits, slots, torch.tensor([draw], dtype=torch.float64), kind).ids
            assert 0 <= int(ids) < 60


@pytest.mark.parametrize(
    "settings", [[GREEDY], [replace(EVERY, top_k=50)], MIXED], ids=("greedy", "few", "mixed")
)
@pytest.mark.parametrize("more", [{}, {"masked": True, "top": 3, "probabilities": True}], ids=str)
def test_nothing_depends_on_values_on_the_device(
    settings: list[SamplingSettings], more: dict[str, object]
) -> None:
    """A fake tensor has a shape and no values to read."""
    every = [replace(each, cfg_scale=1.5) for each in settings]
    with FakeTensorMode(allow_non_fake_inputs=True):
        slots = slots_of(every, 385)
        logits = torch.empty(len(every), 385)
        draws = torch.empty(len(every), dtype=torch.float64)

        found = sample_rows(logits, slots, draws, Kind.of(every, **more))

    assert (found.ids.shape, found.ids.dtype) == ((len(every),), torch.int64)
    if more:
        assert found.top_ids.shape == found.top_probabilities.shape == (len(every), 4)


def test_top_tokens_are_those_of_the_final_distribution() -> None:
    logits = torch.tensor([0.1, 0.5, 0.3, 0.06, 0.04]).log()

    found = sampled(logits, replace(PLAIN, top_k=2, xtc_probability=0.9), draw=0.0)

    assert found.top_ids.tolist() == [[2, 1, 0, 3, 4]]
    expected = [[0.9375, 0.0625, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(found.top_probabilities.tolist(), expected)
    assert found.ids.tolist() == [2]
    torch.testing.assert_close(found.probabilities.tolist(), [0.9375])


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
def test_a_kind_says_how_many_candidates_matter(
    settings: list[SamplingSettings], most: int | None
) -> None:
    assert Kind.of(settings) == Kind(most=most)


def test_a_kind_lists_the_steps_that_are_launched() -> None:
    assert Kind.of([]) == Kind(most=1)
    assert Kind.of([GREEDY], top=5) == Kind(most=64, top=8)
    assert Kind.of([SamplingSettings.greedy(typical=0.5)]) == Kind(most=1)
    assert Kind.of([SamplingSettings.greedy(mirostat=True)]) == Kind(most=64, rest=True)
    assert Kind.of([SamplingSettings(dry_multiplier=1.0, dry_max_ngram=40)]).dry == 64
    whole = Kind.of([replace(EVERY, cfg_scale=1.0)], masked=True, probabilities=True)
    assert whole == Kind(
        most=None,
        probabilities=True,
        cfg=True,
        penalties=True,
        bias=True,
        dry=32,
        masked=True,
        rest=True,
        sorts=True,
    )


def test_any_temperature_leaves_impossible_tokens_out() -> None:
    logits = torch.tensor([-math.inf, 1.0, 2.0])
    settings = replace(PLAIN, temperature=1e308)

    draws = (0.0, *(n / 20 for n in range(1, 20)), LAST_DRAW)
    assert {sample(logits, settings, draw) for draw in draws} == {1, 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 1.1),
        ("typical", -0.1),
        ("min_p", 1.01),
        ("tfs", -0.5),
        ("repetition_penalty", 0),
        ("repetition_range", -2),
        ("dry_allowed_length", 0),
        ("xtc_probability", 1.5),
        ("top_k", 1.5),
        ("temperature", "hot"),
        ("top_p", None),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"`{field}` is {value}; it must be"):
        SamplingSettings(**{field: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_setting_takes_a_number_that_is_not_finite(value: float) -> None:
    for each in fields(SamplingSettings):
        if isinstance(each.default, float) or each.name == "cfg_scale":
            with pytest.raises(ConfigError, match=f"`{each.name}` is {value}; it must be"):
                SamplingSettings(**{each.name: value})


def test_short_help_lists_the_settings_that_are_changed_most() -> None:
    options = {
        each.name: each.metadata["option"] for each in fields(SamplingSettings) if each.metadata
    }

    listed = {name for name, option in options.items() if not option.rare}

    assert listed == {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="`dry_range` is 20; it must be above `dry_max_ngram`"):
        SamplingSettings(dry_multiplier=1.0, dry_range=20)
    with pytest.raises(ConfigError, match="`dry_range` is 1; it must be above"):
        SamplingSettings(dry_multiplier=1.0, dry_range=1)
    assert SamplingSettings(dry_multiplier=1.0, dry_range=21).dry_range == 21
    assert SamplingSettings(token_bias=((0, -math.inf),)).token_bias == ((0, -math.inf),)
    for pair in ((-1, 0.0), (3, math.nan), (3, math.inf)):
        with pytest.raises(ConfigError, match="`token_bias`"):
            SamplingSettings(token_bias=(pair,))
    with pytest.raises(InferenceError, match="`token_bias` has id 9 of a vocabulary of 8"):
        slots_of([SamplingSettings(token_bias=((9, 1.0),))], 8)


def test_default_breakers_are_punctuation_and_special_tokens() -> None:
    pieces = ["a", "b.", "\n", "<s>", "x", ' "', "tab\t", " word"]
    tokenizer, ids = spelled(pieces)
    at = [ids[piece.encode()] for piece in pieces]

    assert breakers(tokenizer) == (EOS, at[1], at[2], at[3], at[5], at[6])
    assert newline_ids(tokenizer) == (EOS, at[2])
