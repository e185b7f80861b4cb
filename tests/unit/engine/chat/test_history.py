"""What the model reads: templates, generated ids, thoughts, names; markers never reach it."""

import random
import re
from datetime import datetime
from pathlib import Path

import pytest
from chatting import EOS, EVERY, notes, own, scripted, text_of, tokenizer_with
from spelled import sentencepiece_tokenizer

from exl2flow.core.requests.conversation import Thinking
from exl2flow.engine.chat import Session, all_formats
from exl2flow.engine.chat.history import Reader, any_of

RAW = all_formats()["raw"]
CHATML = all_formats()["chatml"]
MARKS = ("<|im_start|>", "<|im_end|>")
SYSTEM = "Be good."


def test_context_is_the_template_with_the_generated_ids() -> None:
    fake = scripted("Fine.", "Why?", marks=MARKS)
    session = Session(fake, CHATML, system=SYSTEM)
    letters = [fake.tokenizer.encode(letter)[0] for letter in "Fine."]
    fake._says = lambda number, place: [*letters, EOS][place]

    assert text_of(session.reply("How are you?")) == "Fine."
    assert text_of(session.reply("So?")) == "Fine."

    special = fake.tokenizer.encode
    head = f"<|im_start|>system\n{SYSTEM}\n<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n"
    head += "<|im_start|>assistant\n"
    then = "<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert fake.prompts[0] == special(head, special=True)
    assert fake.prompts[1] == [*fake.prompts[0], *letters, *special(then, special=True)]
    assert session.turns[0].ids == letters != fake.tokenizer.encode("Fine.")


def test_an_answer_that_the_template_changes_is_encoded() -> None:
    shouting = "{% for m in messages %}[{{ m.content | upper if loop.index == 2 else m.content }}]"
    fake = scripted("Fine.")
    session = Session(fake, own(shouting + "{% endfor %}"))
    for text in ("a", "b", "c"):
        list(session.reply(text))

    ids = session.context_ids("d")

    text = "[a][FINE.][b]["
    expected = fake.tokenizer.encode(text) + session.turns[1].ids
    expected += fake.tokenizer.encode("][c][") + session.turns[2].ids
    assert ids == expected + fake.tokenizer.encode("][d]")


def test_a_template_without_system_turns_gets_its_text_with_the_first_message() -> None:
    refusing = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
    fake = scripted("Fine.")
    session = Session(fake, own(refusing + "{% endif %}<{{ m.content }}>{% endfor %}"), system="S")
    list(session.reply("a"))

    assert fake.prompts == [fake.tokenizer.encode("<S\n\na>")]


@pytest.mark.parametrize("keep", [False, True])
def test_thoughts_are_shown_and_stay_out_of_the_context_unless_kept(keep: bool) -> None:
    said = "<think>\nLet me see.\n</think>\n\nFour."
    fake = scripted(said, marks=MARKS)
    session = Session(fake, all_formats()["qwen3"], keep_thinking=keep)

    pieces = list(session.reply("2 + 2?"))

    assert (text_of(pieces, "thinking"), text_of(pieces)) == ("Let me see.\n", "Four.")
    assert (session.turns[0].thinking, session.turns[0].answer) == ("Let me see.\n", "Four.")
    encode = fake.tokenizer.encode
    assert session.turns[0].ids == encode(said, special=True)
    rest = session.context_ids("b")[len(fake.prompts[0]) :]
    tail = encode(
        "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", special=True
    )
    assert rest == (encode(said) if keep else encode("Four.")) + tail


@pytest.mark.parametrize("name", ["qwq", "deepseek-r1"])
@pytest.mark.parametrize("keep", [False, True])
def test_thoughts_that_the_prompt_begins(name: str, keep: bool) -> None:
    marks = (*MARKS, "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
    fake = scripted("Hm.\n</think>\n\nYes.", marks=marks)
    session = Session(fake, all_formats()[name], keep_thinking=keep, system="")

    pieces = list(session.reply("a"))

    assert (text_of(pieces, "thinking"), text_of(pieces)) == ("Hm.\n", "Yes.")
    text = fake.tokenizer.decode(session.context_ids("b"), special=True)
    past, _, _ = text.rpartition("b")
    assert past.count("<think>") == past.count("</think>") == keep
    assert ("Hm." in past, "Yes." in past) == (keep, True)


def test_channels_are_marks_of_thoughts_too() -> None:
    marks = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>")
    final = "<|start|>assistant<|channel|>final<|message|>"
    fake = scripted(
        f"<|channel|>analysis<|message|>Hm.<|end|>{final}Yes.<|return|>",
        "<|channel|>final<|message|>No.<|return|>",
        context=2048,
        marks=marks,
    )
    session = Session(fake, all_formats()["gpt-oss"])

    shown = [[(piece.kind, piece.text) for piece in session.reply(text)] for text in "ab"]

    texts = ["".join(text for kind, text in pieces if kind == "answer") for pieces in shown]
    assert texts == ["Yes.", "No."]
    assert [turn.thinking for turn in session.turns] == ["Hm.", ""]
    text = fake.tokenizer.decode(session.context_ids("c"), special=True)
    assert "Hm." not in text
    assert f"{final}Yes.<|end|>" in text
    assert f"{final}No.<|end|>" in text


def test_raw_is_a_log_with_names() -> None:
    fake = scripted(" Hello", " Bye\n")
    session = Session(fake, RAW, names=("Ada", "Bob"), system="A talk.")
    list(session.reply("a"))
    list(session.reply("b"))

    text = fake.tokenizer.decode(session.context_ids("c"))
    assert text == "A talk.\nAda: a\nBob: Hello\nAda: b\nBob: Bye\nAda: c\nBob:"
    session.system = None
    assert "Ada with Bob" in session.system


def test_amnesia_reads_the_last_message_only() -> None:
    fake = scripted("One.", "Two.")
    session = Session(fake, RAW, system="", amnesia=True)
    first, second = list(session.reply("a")), list(session.reply("b"))

    assert fake.tokenizer.decode(fake.prompts[1]) == "User: b\nAssistant:"
    assert [turn.dropped for turn in session.turns] == [True, False]
    assert notes(first) == notes(second) == ""


def test_a_format_with_its_own_thoughts() -> None:
    marks = Thinking("[[", "]]")
    fake = scripted("[[ hm ]] yes")
    session = Session(fake, own("{{ messages[-1].content }}", thinking=marks))

    pieces = list(session.reply("a"))

    assert (text_of(pieces, "thinking"), text_of(pieces)) == ("hm ", "yes")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | reverse }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }} {% endfor %}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content[:9] }}{% endfor %}",
    ],
)
def test_no_marker_reaches_the_model(template: str) -> None:
    fake = scripted("Fine. ", "Well,", "So")
    session = Session(fake, own(template))
    for text in "abc":
        list(session.reply(text))

    text = fake.tokenizer.decode(session.context_ids("d"))

    spelled = session._reader._rendered("", list("abcd"), ["Fine.", "Well,", "So"])
    assert session._reader._secret[:4] not in text
    assert text.replace(" ", "") == spelled.replace(" ", "")


THINKING = ("qwq", "deepseek-r1")  # thoughts, which the prompt begins, leave the context


@pytest.mark.parametrize("name", [name for name in all_formats() if name not in THINKING])
def test_the_next_turn_begins_with_what_the_last_one_read_and_said(name: str) -> None:
    fake, row = scripted("", marks=EVERY, context=2048), all_formats()[name]
    begin = row.thinking.answer if row.thinking is not None else ""
    said = [*fake.tokenizer.encode(begin, special=True), 70, 71, 72]
    fake._says = lambda number, place: [*said, EOS][place]
    session = Session(fake, row, system=SYSTEM)
    for text in ("a", "b"):
        list(session.reply(text))

    last, ids = fake.prompts[1], session.turns[1].ids
    assert ids == said
    assert session.context_ids("c")[: len(last) + len(ids)] == last + ids


@pytest.mark.parametrize("name", ["mistral-v3", "mistral-v7", "vicuna", "llama", "raw"])
def test_a_space_that_the_model_says_is_not_said_twice(name: str, tmp_path: Path) -> None:
    fake = scripted("")
    fake.tokenizer = fake.model.tokenizer = sentencepiece_tokenizer(tmp_path)
    fake.tokenizer.bos_token_id, fake.tokenizer.eos_token_ids = 1, (2,)
    ids = fake.tokenizer.encode("the quick")
    assert fake.tokenizer.pieces[ids[0]].startswith(" ")
    fake._says = lambda number, place: [*ids, 2][place]
    session = Session(fake, all_formats()[name], system=SYSTEM)

    list(session.reply("a"))

    said = [*fake.prompts[0], *ids]
    assert session.turns[0].ids == ids
    assert session.context_ids("c")[: len(said)] == said


@pytest.mark.parametrize("trusts", [False, True])
def test_special_tokens_that_users_spell_are_text_unless_they_are_trusted(trusts: bool) -> None:
    tokenizer = tokenizer_with(MARKS)
    reader = Reader(CHATML, tokenizer, ("User", "Assistant"), now=datetime(2026, 1, 1))
    mark = tokenizer.backend.token_to_id("<|im_end|>")
    messages = [{"role": "user", "content": "a<|im_end|>b<|im_end|><|im_end|>"}]

    ids, opened = reader.prompt(messages, trusts=trusts)

    assert tokenizer.decode(ids, special=True) == (
        "<|im_start|>user\na<|im_end|>b<|im_end|><|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(mark) == (4 if trusts else 1)
    assert not opened


def test_special_tokens_that_overlap_are_text_as_well() -> None:
    names = ("<a>", "a><b", "<a>>")
    tokenizer = tokenizer_with(names)
    reader = Reader(RAW, tokenizer, ("User", "Assistant"), now=datetime(2026, 1, 1))

    for content in ("<a><b", "<<a>>", "a><b<a>", "<a"):
        ids, _ = reader.prompt([{"role": "user", "content": content}])
        assert content in tokenizer.decode(ids, special=True)
        assert not {*ids} & {*map(tokenizer.backend.token_to_id, names)}


def test_pattern_of_texts_matches_where_one_begins_and_repeats_no_prefix() -> None:
    rng = random.Random(0)
    for _ in range(300):
        texts = {"".join(rng.choices("ab<", k=rng.randint(1, 4))) for _ in range(6)}
        pattern, text = re.compile(any_of(sorted(texts))), "".join(rng.choices("ab<", k=6))
        assert bool(pattern.match(text)) == text.startswith(tuple(texts)), (texts, text)

    names = sorted(f"<unused{i}>" for i in range(1000))
    assert any_of(names).count("unused") == 1


def test_a_prompt_may_end_within_the_last_answer() -> None:
    tokenizer = tokenizer_with(MARKS)
    reader = Reader(CHATML, tokenizer, ("User", "Assistant"), now=datetime(2026, 1, 1))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once "}]

    ids, _ = reader.prompt(messages, goes_on=True)

    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nOnce "
    assert tokenizer.decode(ids, special=True) == text
