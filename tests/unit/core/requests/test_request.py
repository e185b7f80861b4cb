from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.request import EMBEDDING, FIRST_EMBEDDING, Request, Sampled

GUIDED = SamplingSettings(cfg_scale=1.5)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        ("", ("",)),
        ([1, 2, 3], ((1, 2, 3),)),
        ((1, 2), ((1, 2),)),
        (np.array([1, 2]), ((1, 2),)),
        ((), ((),)),
    ],
)
def test_prompt_is_text_or_ids(prompt: Any, prompts: object) -> None:
    assert Request(prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (("good", "bad"), ("good", "bad")),
        (([1, 2], (3,)), ((1, 2), (3,))),
        (("good", [3]), ("good", (3,))),
    ],
)
def test_tuple_of_two_prompts_is_a_pair(prompt: Any, prompts: object) -> None:
    assert Request(prompt, settings=GUIDED).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, 5, ["one", "two"], ("one", "two", "three"), ("one", 5), [1.5], ((1,), ("a",))]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError, match=r"^`prompt` is .*must be text, token ids, or a tuple"):
        Request(prompt)


def test_long_prompt_is_not_repeated_in_the_message() -> None:
    with pytest.raises(ConfigError) as raised:
        Request(["a"] * 10_000)  # type: ignore[list-item]

    assert len(str(raised.value)) < 200


def test_pair_needs_a_scale_and_a_scale_needs_a_pair() -> None:
    with pytest.raises(ConfigError, match="`cfg_scale` is not set"):
        Request(("good", "bad"))
    with pytest.raises(ConfigError, match=r"`cfg_scale` is 1\.5"):
        Request("good", settings=GUIDED)
    with pytest.raises(ConfigError, match=r"`cfg_scale` is 1\.5"):
        Request((1, 2), settings=GUIDED)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0; it must be 1 or more"),
        ({"max_new_tokens": 2.0}, "`max_new_tokens` is 2.0; it must be an integer"),
        ({"max_new_tokens": 2**40}, "`max_new_tokens` is 1099511627776; it must be less"),
        ({"min_new_tokens": -1}, "`min_new_tokens` is -1; it must be 0 or more"),
        ({"min_new_tokens": None}, "`min_new_tokens` is None; it must be an integer"),
        ({"min_new_tokens": 5, "max_new_tokens": 3}, "`min_new_tokens` is 5, `max_new_tokens` o"),
        ({"top_tokens": -1}, "`top_tokens` is -1"),
        ({"top_tokens": True}, "`top_tokens` is True"),
        ({"raw": True, "top_tokens": 21}, "`top_tokens` is 21; it must be 20 or less with `raw`"),
        ({"scores": -1}, "`scores` is -1; it must be 0 or more"),
        ({"scores": 21}, "`scores` is 21; it must be 20 or less"),
        ({"scores": True}, "`scores` is True; it must be an integer"),
        ({"scores": 2.0}, "`scores` is 2.0; it must be an integer"),
        ({"scores": 1, "heal": True}, "`scores` is set, but `heal` replaces the prompt's last"),
        ({"scores": 1, "max_new_tokens": -1}, "`max_new_tokens` is -1; it must be 0 or more"),
        ({"max_skips": -2}, "`max_skips` is -2"),
        ({"seed": "x"}, "`seed` is 'x'; it must be an integer"),
        ({"drawn": -1}, "`drawn` is -1; it must be 0 or more"),
        ({"settings": None}, "`settings` is None; it must be `SamplingSettings`"),
        ({"stops": "\n"}, "`stops` is '\\n'; it must be a sequence"),
        ({"stops": 5}, "`stops` is 5; it must be a sequence"),
        ({"stops": (1, 2.0)}, "`stops` contains 2.0; it takes ids and non-empty strings"),
        ({"stops": ("",)}, "`stops` contains ''"),
        ({"stops": (False,)}, "`stops` contains False"),
        ({"excluded": "no"}, "`excluded` is 'no'; it must be a sequence"),
        ({"excluded": (5, "a")}, "`excluded` is (5, 'a'); it takes token ids"),
        ({"banned_strings": "no"}, "`banned_strings` is 'no'; it must be a sequence"),
        ({"banned_strings": ("",)}, "`banned_strings` contains ''; it takes non-empty strings"),
        ({"banned_strings": (5,)}, "`banned_strings` contains 5"),
        ({"hooks": (None,)}, "`hooks` contains None, which cannot be called"),
        ({"filters": (5,)}, "`filters` contains 5, which is not a filter"),
        ({"embeddings": (5,)}, "`embeddings` contains 5, which is not a tensor"),
        ({"adapters": "a"}, "`adapters` is 'a'; it must be a sequence"),
        ({"adapters": (5,)}, "`adapters` is (5,); it takes adapters, each of them once"),
        ({"excluded": [*range(99), "a"]}, f"`excluded` is {str([*range(99)])[:60]}…; it takes"),
        ({"adapters": "a" * 58}, f"`adapters` is '{'a' * 58}'; it must"),
        ({"adapters": "a" * 59}, f"`adapters` is '{'a' * 59}…; it must"),
    ],
)
def test_values_that_no_model_can_use_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Request("a", **values)

    assert str(raised.value).startswith(message)


def test_scores_of_embeddings_are_refused() -> None:
    rows, prompt = np.zeros((1, 4), np.float32), "{{EMBED_HERE}} a"

    class Rows:
        ndim, shape, dtype = rows.ndim, rows.shape, rows.dtype

        def is_floating_point(self) -> bool:
            return True

        def __len__(self) -> int:
            return len(rows)

    assert Request(prompt, embeddings=(Rows(),)).scores is None
    with pytest.raises(ConfigError, match="`scores` is set, but `embeddings` have no prob"):
        Request(prompt, embeddings=(Rows(),), scores=0)


def test_no_new_tokens_are_enough_with_scores() -> None:
    assert Request("a", scores=0, max_new_tokens=0).max_new_tokens == 0
    assert Request("a", top_tokens=21).top_tokens == 21


@pytest.mark.parametrize(("name", "more"), [("scores", {}), ("top_tokens", {"raw": True})])
def test_as_many_of_the_models_likeliest_tokens_as_it_ranks(
    name: str, more: dict[str, Any]
) -> None:
    assert getattr(Request("a", **{name: 20}, **more), name) == 20
    with pytest.raises(ConfigError, match=f"`{name}` is 21; it must be 20 or less"):
        Request("a", **{name: 21}, **more)


def test_lists_of_the_caller_may_change_afterwards() -> None:
    ids, bans = [1, 2], ["no"]
    stops: list[int | str] = [1, "\n"]
    request = Request(ids, stops=stops, banned_strings=bans)

    ids.clear()
    stops.clear()
    bans.clear()

    assert (request.prompt, request.stops) == ((1, 2), (1, "\n"))
    assert request.banned_strings == ("no",)


def test_defaults_change_nothing() -> None:
    request = Request("a")

    assert (request.max_new_tokens, request.stops, request.seed) == (None, None, None)
    assert request.settings == SamplingSettings()
    assert (request.probabilities, request.top_tokens, request.logits) == (False, 0, False)
    assert Request("a", stops=(), max_skips=None) == Request("a", stops=[], max_skips=None)


def test_texts_go_on_in_loops_and_share_the_cache_unless_told_otherwise() -> None:
    request = Request((1,))

    assert (request.end_loops, request.salt, request.raw, request.prefer_end) == (
        False,
        b"",
        False,
        False,
    )


def test_texts_hide_special_tokens_and_use_their_seed_from_its_first_draw() -> None:
    request = Request("a", seed=5)

    assert (request.decode_special, request.drawn) == (False, 0)


def test_a_filter_is_what_can_be_started() -> None:
    right = SimpleNamespace(start=lambda tokenizer, width, prefix="": None)
    wrong = SimpleNamespace(start="now")

    assert Request("a", filters=[right]).filters == (right,)
    with pytest.raises(ConfigError, match="which is not a filter"):
        Request("a", filters=[right, wrong])


def test_adapters_differ_in_their_digests() -> None:
    one, same, other = (SimpleNamespace(digest=digest) for digest in (b"1", b"1", b"2"))

    assert Request("a", adapters=[one, other]).adapters == (one, other)
    with pytest.raises(ConfigError, match="it takes adapters, each of them once"):
        Request("a", adapters=[one, same])


def test_an_id_without_a_row_is_named_with_its_number() -> None:
    rows = torch.zeros(3, 4)

    with pytest.raises(ConfigError, match=r"^id 1000000003 in the prompt is row 3 of .* has 3$"):
        Request((5, 1_000_000_003, 5), embeddings=(rows,))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4,), torch.float16),
        ((0, 4), torch.float16),
        ((2, 4), torch.int64),
        ((1, 2, 4), torch.half),
    ],
)
def test_embeddings_are_rows_of_floating_point_numbers(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(ConfigError, match="`embeddings` contains a tensor of shape"):
        Request((FIRST_EMBEDDING,), embeddings=(torch.zeros(shape, dtype=dtype),))


@pytest.mark.parametrize(
    ("prompt", "tensors", "is_refused"),
    [
        (f"{EMBEDDING} a", 1, False),
        (f"{EMBEDDING} a {EMBEDDING} b", 2, False),
        (f"{EMBEDDING} a", 2, True),
        (f"{EMBEDDING} a {EMBEDDING} b", 1, True),
        ("a", 1, True),
        ((f"{EMBEDDING} a", "b"), 1, False),
        (("a", f"{EMBEDDING} {EMBEDDING} b"), 2, False),
        ((f"{EMBEDDING} a", f"{EMBEDDING} {EMBEDDING} b"), 2, True),
        (("a", "b"), 2, True),
        ((5, FIRST_EMBEDDING, 5), 1, False),
        ((5, FIRST_EMBEDDING + 2, 5), 1, False),
        ((5, FIRST_EMBEDDING + 3, 5), 1, True),
        ((5, 6), 1, True),
        (((FIRST_EMBEDDING, 5), (5, 6)), 1, False),
    ],
)
def test_all_embeddings_have_a_place_in_the_prompt(
    prompt: Any, tensors: int, is_refused: bool
) -> None:
    rows = [torch.zeros(3, 4)] * tensors
    is_pair = isinstance(prompt, tuple) and not isinstance(prompt[0], int)
    settings = GUIDED if is_pair else SamplingSettings()
    refused = pytest.raises(ConfigError, match="`embeddings`")

    with refused if is_refused else nullcontext():
        assert len(Request(prompt, embeddings=rows, settings=settings).embeddings) == tensors


@pytest.mark.parametrize("name", ["max_new_tokens", "min_new_tokens", "top_tokens", "drawn"])
def test_numbers_of_tokens_are_below_two_to_the_31(name: str) -> None:
    others = {} if name == "max_new_tokens" else {"max_new_tokens": None}
    assert getattr(Request("a", **{name: 2**31 - 1}, **others), name) == 2**31 - 1
    with pytest.raises(ConfigError, match=rf"`{name}` is {2**31}; it must be less than"):
        Request("a", **{name: 2**31}, **others)


def test_a_text_is_overtaken_a_few_times_and_filters_see_its_tokens() -> None:
    token = Sampled(
        sampled_token=1, sampled_prob=1.0, candidate_tokens=[1], candidate_probs=[1.0], logits=None
    )

    assert Request("a").max_skips == 4
    assert token.feed_filters is True


def test_requests_with_equal_prompts_are_equal_whatever_their_embeddings() -> None:
    one, other = (
        Request((FIRST_EMBEDDING,), embeddings=(torch.full((1, 4), x),)) for x in (0.0, 1.0)
    )

    assert one == other
