"""Calibration rows of dialogues in a model's chat template."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import make_tiny

from exl2flow.core.errors import CalibrationError, ChatTemplateError, NotEnoughRows
from exl2flow.model import ChatTemplate, Message, Tokenizer
from exl2flow.quant.tokenize import dialogues
from exl2flow.quant.tokenize.dialogues import (
    CONTINUE_IN,
    asked_for,
    chat_rows,
    check_template,
    dialogue_stream,
    read_dialogue,
    render,
    written_dialogues,
)
from exl2flow.quant.tokenize.mix import CalibrationRows, RowRequest

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
BOS, EOS = 0, 1
TALK = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Why?"),
    Message(role="assistant", content="Because."),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tiny("llama", tmp_path_factory.mktemp("dialogues")))


def template_of(text: str) -> ChatTemplate:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(text, special_tokens=tokens, origin=Path("chat_template.jinja"))


def parquet_of(folder: Path, texts: list[str], *, kind: str = "chat", language: str = "en") -> Path:
    columns = {"kind": [kind] * len(texts), "language": [language] * len(texts), "text": texts}
    pq.write_table(pa.table(columns), folder / f"{kind}.parquet")
    return folder / f"{kind}.parquet"


def of_written_only(folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the written dialogues be these, and the standard set hold nothing that can be used."""
    path, nothing = parquet_of(folder, texts), parquet_of(folder, ["x"], kind="web")
    monkeypatch.setattr(dialogues, "chat", lambda: path)
    monkeypatch.setattr(dialogues, "standard", lambda: nothing)


def rows_of(tokenizer: Tokenizer, rows: int, row_tokens: int) -> CalibrationRows:
    request = RowRequest(rows=rows, row_tokens=row_tokens)
    return chat_rows(dialogue_stream(template_of(TEMPLATE), tokenizer), request)


def test_turns_begin_at_lines_with_their_role() -> None:
    text = "<system>\nBe brief.\n<user>\nWhat is <user> in HTML?\n\n<b>\n<assistant>\nNothing.\n"

    assert read_dialogue(text) == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="What is <user> in HTML?\n\n<b>"),
        Message(role="assistant", content="Nothing."),
    )


@pytest.mark.parametrize("text", ["Hello\n<user>\nHi", "Hello", ""])
def test_text_without_a_first_role_is_refused(text: str) -> None:
    with pytest.raises(CalibrationError, match="begins with a line `<user>`"):
        read_dialogue(text)


def test_bundled_dialogues_alternate_and_end_with_an_answer() -> None:
    for dialogue in written_dialogues():
        roles = [message.role for message in dialogue if message.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2), dialogue[0]
        assert "system" not in [message.role for message in dialogue[1:]]
        assert all(message.content.strip() == message.content != "" for message in dialogue)


def test_texts_of_every_kind_become_answers() -> None:
    made = asked_for()

    kinds = {"web", "encyclopedia", "code", "stories", "multilingual", "technical"}
    assert set(made) == kinds
    for kind in kinds:
        for question, answer in made[kind]:
            assert (question.role, answer.role) == ("user", "assistant")
            assert question.content
            assert answer.content


def test_every_language_of_the_standard_set_has_a_request() -> None:
    table = pq.read_table(dialogues.standard(), columns=["kind", "language"]).to_pylist()
    languages = {row["language"] for row in table if row["kind"] == "multilingual"}

    assert languages == set(CONTINUE_IN)


@pytest.mark.parametrize(
    ("kind", "language", "text", "asked", "answered"),
    [
        (
            "multilingual",
            "de",
            "Titel\n\nEins.\nZwei.\n",
            "Schreibe diesen Text weiter:\n\nTitel",
            "Eins.\nZwei.",
        ),
        (
            "code",
            "python",
            "a = 1\nb = {2}\n",
            "in python. Write the rest of it.\n\n```\na = 1\n```",
            "```\nb = {2}\n```",
        ),
        (
            "encyclopedia",
            "en",
            "Quartz\n\nA mineral.",
            "Write an encyclopedia article about this subject: Quartz",
            "A mineral.",
        ),
    ],
)
def test_a_text_is_cut_into_request_and_answer(
    kind: str, language: str, text: str, asked: str, answered: str, tmp_path: Path
) -> None:
    path = parquet_of(tmp_path, [text], kind=kind, language=language)

    ((question, answer),) = asked_for(path)[kind]

    assert question.content.endswith(asked)
    assert answer.content == answered


def test_rows_are_what_the_template_writes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"<user>\nQuestion {n}?\n<assistant>\n{'quick brown fox ' * 9}" for n in range(4)]
    of_written_only(tmp_path, texts, monkeypatch)

    made = rows_of(tokenizer, 2, 64)

    assert made.kinds == ("chat", "chat")
    assert made.ids[:, 0].tolist() == [BOS, BOS]
    ids = made.ids[0].tolist()
    end = ids.index(EOS)
    assert tokenizer.decode(ids[1:end]) == "[user]Question 0?"
    assert tokenizer.decode(ids[end + 1 : end + 24]).startswith("[assistant]quick")


def test_bundled_dialogues_fill_the_default_share_of_rows(tokenizer: Tokenizer) -> None:
    made = rows_of(tokenizer, 58, 2048)

    assert made.ids.shape == (58, 2048)
    assert len(made.ids.unique(dim=0)) == 58
    assert (made.ids[:, 0] == BOS).all()
    assert made.notes == ()


def test_dialogues_that_spell_special_tokens_are_left_out(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = "<user>\nWhat?\n<assistant>\nplain " + "word " * 40
    of_written_only(tmp_path, ["<user>\nWhat is <s>?\n<assistant>\nMarkup.", fine], monkeypatch)

    made = rows_of(tokenizer, 1, 32)

    assert "plain" in tokenizer.decode(made.ids[0].tolist())


def test_short_dialogues_overlap_and_say_so(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_written_only(tmp_path, ["<user>\nWhy?\n<assistant>\n" + "word " * 30], monkeypatch)

    made = rows_of(tokenizer, 9, 64)

    (note,) = made.notes
    assert note.startswith("chat: ")
    assert note.endswith("tokens for 9 rows of 64; rows overlap")


def test_dialogues_shorter_than_a_row_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_written_only(tmp_path, ["<user>\nWhy?\n<assistant>\nBecause."], monkeypatch)

    with pytest.raises(NotEnoughRows, match="one row needs 128; lower `row_tokens`"):
        rows_of(tokenizer, 1, 128)


def test_where_a_template_has_no_system_turn_the_user_says_it() -> None:
    text = render(template_of(NO_SYSTEM), TALK)

    assert text == "[user]Be brief.\n\nWhy?[assistant]Because."


def test_rows_do_not_depend_on_the_day() -> None:
    text = render(template_of("{{ strftime_now('%Y-%m-%d') }}"), TALK)

    assert text == "2024-07-26"


def test_a_template_that_refuses_everything_is_an_error() -> None:
    template = template_of("{{ raise_exception(messages | length | string) }}")

    with pytest.raises(ChatTemplateError, match="turns of user, assistant: 2"):
        check_template(template)
    with pytest.raises(ChatTemplateError, match="turns of user, assistant: 2"):
        render(template, TALK)
