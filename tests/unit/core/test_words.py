import pytest

from exl2flow.core import words


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (12, "12 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (1_500, "1.50 kB"),
        (2_340_000, "2.34 MB"),
        (3_701_000_000, "3.70 GB"),  # 3.45 GiB
    ],
)
def test_sizes_are_decimal(count: int, text: str) -> None:
    assert words.size(count) == text


@pytest.mark.parametrize(
    "word", [words.bits, words.perplexity, words.divergence, words.error, words.cost, words.percent]
)
def test_unknown_values_are_dashes(word) -> None:
    assert word(None) == "–"


def test_each_figure_has_its_own_number_of_digits() -> None:
    assert [
        words.bits(4.00049),
        words.perplexity(2.50774),
        words.divergence(0.005541),
        words.error(0.03864),
        words.percent(0.94571),
        words.percent(0.25, 1),
    ] == ["4.000", "2.5077", "0.00554", "0.0386", "94.57 %", "25.0 %"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.02, "0.020"), (0.00012345, "0.00012"), (2.4e-5, "2.4e-05"), (1.5, "1.5")]
)
def test_costs_have_two_digits_however_small(value: float, text: str) -> None:
    assert words.cost(value) == text


def test_names_lose_the_prefix_that_all_share() -> None:
    assert words.short("model.layers.3.mlp, lm_head") == "3.mlp, lm_head"
    assert words.short("language_model.model.layers.3.mlp") == "3.mlp"
    assert words.short("model.language_model.layers.3.mlp") == "3.mlp"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "a"), "No such file or directory"),
        (OSError("odd"), "odd"),
        (KeyError("r"), "`r` is missing"),
        (ValueError("broken"), "broken"),
    ],
)
def test_cause_is_what_an_error_says(error: Exception, said: str) -> None:
    assert words.cause(error) == said


def test_a_spread_is_the_mean_and_how_far_values_lie_apart() -> None:
    assert words.spread([3.0, 1.0, 2.0], words.bits) == "2.000 (1.000 to 3.000)"
    assert words.spread([2.0], words.bits) == "2.000"
    assert words.spread([], words.bits) == "–"
    assert words.spread([2.0, None], words.bits) == "–"


def test_an_interval_has_two_bounds() -> None:
    assert words.interval((1.0, 2.5), words.bits) == "1.000 to 2.500"
    assert words.interval(None, words.bits) == "–"


def test_names_that_may_have_been_meant_are_listed_else_all() -> None:
    assert words.nearest("tokn", ["token", "other"]) == "; near are `token`"
    assert words.nearest("nonsense", ["token", "other"]) == "; there are `other`, `token`"
    assert words.nearest("x", []) == ""
    many = words.nearest("token", ["tokena", "tokenb", "tokenc", "tokend"])
    assert many == "; near are `tokend`, `tokenc`, `tokenb`"  # no more than three
