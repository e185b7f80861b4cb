"""Options of `generate` are fields of `Request`; a wrong name leads to the right one."""

from typing import get_type_hints

import pytest

from exl2flow.core.errors import ConfigError
from exl2flow.core.requests.request import Request, listed
from exl2flow.core.requests.text_options import MEANT, TextOptions, refuse_unknown


def test_options_are_the_fields_of_a_request() -> None:
    fields = get_type_hints(Request)
    for name in ("prompt", "seed", "tag", "_"):
        fields.pop(name, None)

    assert get_type_hints(TextOptions) == fields


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_tokens", "give `max_new_tokens`"),
        ("n_predict", "give `max_new_tokens`"),
        ("stop", "give `stops`"),
        ("temperature", r"give `settings=SamplingSettings\(temperature=…\)`"),
        ("banned_string", "near are `banned_strings`"),
        ("nonsense", "there are `adapters`, `add_bos`"),
    ],
)
def test_a_wrong_name_leads_to_the_right_one(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is not an option of `generate`; {advice}"):
        refuse_unknown([name], [*TextOptions.__annotations__], "generate")


def test_names_of_other_libraries_lead_to_fields() -> None:
    assert {*MEANT.values()} <= {*get_type_hints(Request)}


@pytest.mark.parametrize("prompts", [None, 3, 2.5, b"text", {"role": "user"}, {"a", "b"}])
def test_what_is_neither_text_nor_a_list_of_prompts_is_refused(prompts: object) -> None:
    with pytest.raises(ConfigError, match=r"`prompts` is .*; give a text, or a list of texts"):
        listed(prompts)


def test_ids_of_one_prompt_are_not_taken_for_prompts() -> None:
    with pytest.raises(ConfigError, match="put the ids of a prompt in a list"):
        listed([1, 2, 3])


@pytest.mark.parametrize("prompt", [b"text", {1: 2}, {1, 2}, {"role": "user"}, None, 3])
def test_a_prompt_that_only_looks_like_ids_is_refused(prompt: object) -> None:
    with pytest.raises(ConfigError, match=r"it must be text, token ids"):
        Request(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"role": "user", "content": "Hi"}, [{"role": "user"}]])
def test_messages_lead_to_a_session(given: object) -> None:
    for call in (listed, Request):
        if call is listed and isinstance(given, list):
            continue  # it may be a list of prompts; the first one is refused
        with pytest.raises(ConfigError, match=r"for messages use `Session` of"):
            call(given)  # type: ignore[operator]
