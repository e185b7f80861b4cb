"""Texts under filters: they match, in any company, also where they are cut back."""

import json
import random
import re
from pathlib import Path

import pytest

from exl2flow.core.errors import ConfigError, FilterDeadEnd
from exl2flow.core.requests.request import Sampled
from exl2flow.engine.drafts import Drafter, NgramDraft
from exl2flow.engine.filters import GrammarFilter, PrefixFilter, SelectFilter
from exl2flow.inference import Event, Generator, LoadedModel, Request, SamplingSettings, load_model

DEMO = Path(__file__).parents[4] / "demo" / "model"
HOT = SamplingSettings(temperature=1.5, top_k=0, top_p=0.0)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [7, 42]}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON, DATE = GrammarFilter(json_schema=SCHEMA), GrammarFilter(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(DEMO, device="cpu", max_tokens=512)


def request(*filters: object, prompt: str = "The answer is ", **more: object) -> Request:
    return Request(prompt, **{"max_new_tokens": 60, "settings": HOT, "filters": filters, **more})


def texts_of(
    model: LoadedModel, *requests: Request, slots: int = 4, draft: Drafter | None = None
) -> list[tuple[str, Event]]:
    """Return text and last event of each request, generated together."""
    generator = Generator(model, tokens=4096, slots=slots, draft=draft)
    jobs = [(generator.submit(r, deliver=(seen := []).append), seen) for r in requests]
    while not generator.is_idle:
        generator.step()
    assert generator.free_pages == generator.pages
    return [("".join(e.text for e in events), events[-1]) for _, events in jobs]


def test_texts_are_those_of_their_filters(model: LoadedModel) -> None:
    wanted = [
        request(JSON, seed=1),
        request(DATE, seed=2),
        request(SelectFilter(["red", "green", "dark red"]), seed=3),
        request(PrefixFilter("Once", "There"), seed=4),
        request(seed=5),
    ]

    (person, json_end), (date, date_end), (colour, end), (story, _), _ = texts_of(model, *wanted)

    assert json.loads(person)["age"] in (7, 42)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert colour in ("red", "green", "dark red")
    assert story.startswith(("Once", "There"))
    assert {json_end.reason, date_end.reason, end.reason} <= {"end_filter", "stop_token"}


def test_filtered_text_is_the_same_in_any_company(model: LoadedModel) -> None:
    wanted = [request(f, seed=i) for i, f in enumerate([JSON, DATE, JSON, DATE, JSON])]
    wanted += [request(seed=i, max_new_tokens=20) for i in range(3)]

    together = texts_of(model, *wanted, slots=4)
    alone = [texts_of(model, each, slots=1)[0] for each in wanted]

    assert [text for text, _ in together] == [text for text, _ in alone]


def test_filters_hold_together(model: LoadedModel) -> None:
    ((text, _),) = texts_of(
        model, request(GrammarFilter(regex="[ab]{3,9}"), PrefixFilter("aba"), seed=1)
    )

    assert re.fullmatch("aba[ab]{0,6}", text)


def test_a_ban_inside_a_grammar_cuts_both_back(model: LoadedModel) -> None:
    bans = ("0", "1", "2", "3", "4")
    wanted = [request(DATE, seed=i, banned_strings=bans) for i in range(6)]

    found = texts_of(model, *wanted)

    assert all(re.fullmatch("[5-9]{4}-[5-9]{2}-[5-9]{2}", text) for text, _ in found)


def test_a_ban_moves_to_a_later_token_where_a_filter_allows_no_other_beginning(
    model: LoadedModel,
) -> None:
    source, wanted, expected = random.Random(0), list[Request](), list[set[str]]()
    for seed in range(24):
        endings = {"".join(source.choices("aeirst ", k=source.randint(1, 5))) for _ in range(6)}
        choices = sorted("Z" + source.choice(("", "ar")) + ending for ending in endings)
        bans = [one[: source.randint(3, 7)] for one in choices if source.random() < 0.5]
        options = {"seed": seed, "banned_strings": bans, "prompt": "\n".join([*choices, ""])}
        wanted.append(request(SelectFilter(choices), **options))
        expected.append({one for one in choices if not any(ban in one for ban in bans)})

    found = texts_of(model, *wanted)
    drafted = texts_of(model, *wanted, draft=NgramDraft())

    assert [text for text, _ in drafted] == [text for text, _ in found]
    assert sum(event.statistics.accepted_tokens for _, event in drafted) > 10
    assert sum(map(bool, expected)) > 10
    for (text, end), texts in zip(found, expected, strict=True):
        if texts:
            assert text in texts
        else:
            assert isinstance(end.error, FilterDeadEnd)


@pytest.mark.parametrize(("bans", "text"), [((), "x-yz"), (("x-y",), "xyz")])
def test_a_hook_may_conceal_tokens_from_filters(
    model: LoadedModel, bans: tuple[str, ...], text: str
) -> None:
    (dash,) = model.tokenizer.encode("-")
    seen = list[int]()

    def insert(sampled: Sampled) -> None:
        seen.append(sampled.sampled_token)
        if len(seen) == 2:
            sampled.sampled_token, sampled.feed_filters = dash, False

    wanted = request(SelectFilter(["xyz"]), hooks=(insert,), banned_strings=bans)

    ((found, end),) = texts_of(model, wanted)

    assert (found, end.reason) == (text, "end_filter")


def test_a_text_ends_as_soon_as_its_filters_allow_it(model: LoadedModel) -> None:
    letters = GrammarFilter(regex="[a-z]{2,40}")

    (short, end), (longer, _) = texts_of(
        model, request(letters, seed=1, prefer_end=True), request(letters, seed=1)
    )

    assert longer.startswith(short)
    assert len(short) < len(longer)
    assert end.reason == "end_filter"


def test_a_healed_token_belongs_to_the_filtered_text(model: LoadedModel) -> None:
    found = texts_of(
        model,
        *(
            request(SelectFilter(["house", "horse"]), prompt="the old ho", heal=True, seed=i)
            for i in range(4)
        ),
    )

    assert {"house", "horse"} >= {text for text, _ in found}


def test_a_dead_end_ends_its_job_only(model: LoadedModel) -> None:
    (_, dead), (text, _) = texts_of(
        model,
        request(GrammarFilter(regex="[a-f]+x"), PrefixFilter("ghost"), seed=1),
        request(SelectFilter(["yes"]), seed=2),
    )

    assert isinstance(dead.error, FilterDeadEnd)
    assert text == "yes"


def test_a_text_that_must_not_end_yet_ends_where_its_filter_does(model: LoadedModel) -> None:
    ((text, end),) = texts_of(model, request(SelectFilter(["no"]), seed=1, min_new_tokens=40))

    assert (text, end.reason) == ("no", "end_filter")


def test_objects_that_are_not_filters_are_refused() -> None:
    with pytest.raises(ConfigError, match="`filters` contains 'yes', which is not a filter"):
        Request("a", filters=["yes"])


@pytest.mark.parametrize("draft", [None, NgramDraft()])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_stop_that_is_not_eos_ends_a_complete_text(
    model: LoadedModel, draft: Drafter | None, as_text: bool
) -> None:
    (stop,) = model.tokenizer.encode("\n")
    eager = SamplingSettings(temperature=1.0, token_bias=((stop, 100.0),))
    stops = ["\n" if as_text else stop]
    letters = GrammarFilter(regex=r"[a-z]{3,40}")
    wanted = [
        request(letters, settings=eager, stops=stops, seed=1),
        request(SelectFilter(["red", "reddish"]), settings=eager, stops=stops, seed=2),
        request(GrammarFilter(regex=r"(?s).*"), settings=eager, stops=stops, seed=3),
    ]

    (word, end), (colour, colour_end), (free, free_end) = texts_of(model, *wanted, draft=draft)

    assert re.fullmatch("[a-z]{3,}", word)
    assert len(word) < 12
    assert (colour, free) == ("red", "")
    reason = "stop_string" if as_text else "stop_token"
    assert {end.reason, colour_end.reason, free_end.reason} == {reason}


def test_a_changed_stop_ends_a_filtered_text(model: LoadedModel) -> None:
    (stop,) = model.tokenizer.encode("\n")
    eager = SamplingSettings(temperature=1.0, token_bias=((stop, 100.0),))
    generator, events = Generator(model, tokens=1024, slots=1), list[Event]()
    letters = GrammarFilter(regex=r"[a-z]{3,}")
    job = generator.submit(request(letters, settings=eager, seed=1), deliver=events.append)
    while job.output.new_tokens < 8:
        generator.step()

    generator.change(job, stops=[stop])
    while not generator.is_idle:
        generator.step()

    assert events[-1].reason == "stop_token"
    assert re.fullmatch("[a-z]{8,}", "".join(event.text for event in events))
