"""Chat templates: where they are found, that they render as in transformers, what they refuse."""

import gc
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny
from transformers import PreTrainedTokenizerFast

from exl2flow.core.errors import ChatTemplateError, ConfigError
from exl2flow.model import ChatTemplate, Message, Tokenizer
from exl2flow.model.text import chat_template, template_program

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


def test_messages_with_images_are_refused(folder: Path) -> None:
    content: Any = [{"type": "text", "text": "What is this?"}, {"type": "image", "url": "a.png"}]

    with pytest.raises(ConfigError, match="message 1 holds an image"):
        with_template(folder, "a").render([Message(role="user", content=content)])


def test_template_file_takes_precedence_over_the_tokenizer_config(folder: Path) -> None:
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
def test_error_for_a_model_without_template_says_what_to_do(
    folder: Path, config: dict[str, object] | None
) -> None:
    if config is not None:
        with_config(folder, **config)

    with pytest.raises(ChatTemplateError, match=r"no chat template.*; put the template"):
        loaded(folder)
    with pytest.raises(ChatTemplateError, match=r"no chat template.*; do this, or put the"):
        ChatTemplate.load(folder, Tokenizer.load(folder), otherwise="do this")
    assert chat_template.find_template(folder) is None


def test_error_of_a_template_ends_with_the_callers_advice() -> None:
    path = Path("a.jinja")
    template = ChatTemplate("{{ 1 // 0 }}", special_tokens={}, origin=path, advice="do that")

    with pytest.raises(ChatTemplateError, match=r"zero; do that$"):
        template.render(TALK)


def test_a_template_of_another_type_is_refused(folder: Path) -> None:
    with_config(folder, chat_template=7)

    with pytest.raises(ChatTemplateError, match="neither text nor a list"):
        loaded(folder)


def test_a_template_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")

    with pytest.raises(ChatTemplateError, match="as UTF-8 text"):
        loaded(folder)


def test_a_template_that_is_not_jinja_is_refused(folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja` does not compile"):
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
def test_refusals_and_forbidden_operations_of_a_template_are_errors(
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


DOUBLING = """\
{% set ns = namespace(x='a') %}
{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}"""
LOOPS = """\
{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}
{% endfor %}{% endfor %}{% endfor %}"""
ENDLESS_MACRO = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}"
FAN_MACRO = """\
{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}"""


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10000000000000 }}",
        "{{ 'a' * 2000000000 }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ 'a' | center(10 ** 12) }}",
        "{{ 'a'.join(['b' * 10 ** 7] * 10 ** 3) }}",
        DOUBLING,
        ENDLESS_MACRO,
    ],
)
def test_a_template_that_takes_all_memory_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"(cannot render turns|does not compile).*memory|rec"
    ):
        with_template(folder, text).render(TALK)


@pytest.mark.parametrize("text", [LOOPS, FAN_MACRO, "{{ 9 ** (9 ** (7 + messages | length)) }}"])
def test_a_template_that_never_ends_is_refused(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patient = Path(str(template_program.__file__)).read_text(encoding="utf-8")
    hasty = tmp_path / "hasty.py"
    hasty.write_text(patient.replace("SECONDS = 5.0", "SECONDS = 0.3"))
    monkeypatch.setattr(chat_template, "PROGRAM", hasty)
    template = with_template(folder, "{% if messages | length > 2 %}" + text + "{% endif %}short")

    with pytest.raises(ChatTemplateError, match="more time or memory"):
        template.render(TALK)

    assert template.render(TALK[:1]) == "short"  # in a new process


@pytest.mark.parametrize(
    "text",
    [
        "{% for None in x %}{% endfor %}",
        "{{ '\ud800' }}".encode("unicode_escape").decode(),
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 100_000 + "1 }}",
        "{% set x = namespace() %}{% set x.y.z = 1 %}",
        "{{ super() }}{{ self.x() }}",
        "{{ range(10 ** 9) | list }}",
        "{{ strftime_now(1) }}{{ tojson() }}",
        "{% include 'other' %}",
        "{{ raise_exception() }}",
    ],
)
def test_whatever_a_template_raises_is_one_error(folder: Path, text: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja`"):
        with_template(folder, text).render(TALK)


@pytest.mark.parametrize(
    "value", [[{"name": []}], [{"name": {"a": 1}, "template": 1}], [1, None, []], {"a": 1}]
)
def test_foreign_types_in_the_tokenizers_config_are_refused(folder: Path, value: object) -> None:
    with_config(folder, chat_template=value)

    with pytest.raises(ChatTemplateError, match="chat_template"):
        loaded(folder)


def test_the_process_of_a_template_ends_with_it(folder: Path) -> None:
    template = with_template(folder, "a")
    child = Path(f"/proc/{template._started()._child.pid}")
    assert child.exists()

    del template
    gc.collect()

    assert not child.exists()
