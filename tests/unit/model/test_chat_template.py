"""Chat templates: where they are found, that they render as in transformers, what they refuse."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from tiny import make_tiny
from transformers import PreTrainedTokenizerFast

from exl2flow.core.errors import ChatTemplateError
from exl2flow.model import ChatTemplate, Message, Tokenizer

TALK = (
    Message(role="system", content=" Be brief. "),
    Message(role="user", content='1 < 2, "quoted" & naïve?'),
    Message(role="assistant", content="Yes.\n"),
)
CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}
"""
WITH_BOS = """\
{{ bos_token }}
{%- for message in messages -%}
    [{{ message['role'] | upper }}]{{ message['content'] }}{{ eos_token }}
{%- endfor %}
"""
OF_ALL_SORTS = """\
{%- set seen = namespace(count=0) %}
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if message.role not in ('user', 'assistant') %}{% continue %}{% endif %}
{%- set seen.count = seen.count + 1 %}
{%- if message.role == 'assistant' %}
{% generation %}<{{ message.content.strip() }}>{% endgeneration %}
{%- else %}
{{ message | tojson }}
{%- endif %}
{%- endfor %}
{{ seen.count }}{% if tools is not none %} with tools{% endif %}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def with_template(folder: Path, text: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return loaded(folder)


def loaded(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder, Tokenizer.load(folder))


def with_config(folder: Path, **values: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("text", [CHATML, WITH_BOS, OF_ALL_SORTS])
@pytest.mark.parametrize("prompt", [False, True])
def test_text_is_that_of_transformers(folder: Path, text: str, prompt: bool) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    messages = [{"role": message.role, "content": message.content} for message in TALK]
    expected = reference.apply_chat_template(
        messages, chat_template=text, tokenize=False, add_generation_prompt=prompt
    )

    made = with_template(folder, text).render(TALK, add_generation_prompt=prompt)

    assert made == expected
    assert "Yes." in made


def test_a_file_of_its_own_goes_before_the_tokenizers_config(folder: Path) -> None:
    with_config(folder, chat_template="config")

    from_config = loaded(folder).render(TALK)
    from_file = with_template(folder, "file").render(TALK)

    assert (from_config, from_file) == ("config", "file")


def test_of_several_templates_the_default_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    with_config(folder, chat_template=named)

    assert loaded(folder).render(TALK) == "a"


def test_several_templates_without_a_default_are_refused_by_name(folder: Path) -> None:
    with_config(folder, chat_template=[{"name": "rag", "template": "b"}])

    with pytest.raises(ChatTemplateError, match=r"named rag, but no `default`; put the one"):
        loaded(folder)


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}])
def test_a_model_without_template_is_told_what_to_do(
    folder: Path, config: dict[str, object] | None
) -> None:
    if config is not None:
        with_config(folder, **config)

    with pytest.raises(ChatTemplateError, match=r"no chat template.*use another calibration"):
        loaded(folder)


def test_a_template_of_another_type_is_refused(folder: Path) -> None:
    with_config(folder, chat_template=7)

    with pytest.raises(ChatTemplateError, match="neither text nor a list"):
        loaded(folder)


def test_a_template_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")

    with pytest.raises(ChatTemplateError, match="as UTF-8 text"):
        loaded(folder)


def test_a_template_that_is_not_jinja_is_refused(folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja` is not valid Jinja"):
        with_template(folder, "{% for message in %}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_an_error(
    folder: Path, text: str, reason: str
) -> None:
    template = with_template(folder, text)

    with pytest.raises(ChatTemplateError, match=f"turns of system, user, assistant: .*({reason})"):
        template.render(TALK)


def test_special_tokens_come_from_files_or_else_from_the_ids(folder: Path) -> None:
    text = "{{ bos_token }} {{ eos_token }} {{ pad_token }}"
    by_id = with_template(folder, text).render(TALK)
    with_config(folder, bos_token={"content": "<begin>"}, pad_token="<pad>", eos_token=None)

    by_file = loaded(folder).render(TALK)

    assert (by_id, by_file) == ("<s> </s> ", "<begin> </s> <pad>")


def test_a_date_can_be_given(folder: Path) -> None:
    template = with_template(folder, "{{ strftime_now('%d %b %Y') }}")

    assert template.render(TALK, now=datetime(2024, 7, 26)) == "26 Jul 2024"
    assert template.render(TALK) == datetime.now().strftime("%d %b %Y")


def test_further_variables_reach_the_template(folder: Path) -> None:
    template = with_template(folder, "{{ 'thinks' if enable_thinking else 'answers' }}")

    assert template.render(TALK) == "answers"
    assert template.render(TALK, variables={"enable_thinking": True}) == "thinks"
