"""Each format against a table of what it must write, transcribed by hand; which one is chosen."""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from chatting import EVERY, scripted, tokenizer_with
from tiny import make_tiny
from transformers import PreTrainedTokenizerFast

from exl2flow.core.errors import ChatTemplateError, ConfigError, UnknownPromptFormat
from exl2flow.engine.chat import Answer, Session, Turn, all_formats, choose_format
from exl2flow.engine.chat.history import Reader
from exl2flow.engine.filters import PrefixFilter
from exl2flow.inference import Generator, SamplingSettings, load_model
from exl2flow.model import Message

NOW = datetime(2026, 3, 4)
USERS = ("What is 1 < 2?", " Two\nlines ", "Three")
ANSWERS = ("It is true.", "Second\n\nanswer", "")
SYSTEM = "Be brief."


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a format writes: `⏎` is a newline, Ⓢ the system text, Ⓤ a message.

    sys: only with a system prompt; turn: the first message up to its answer; next: what follows an
    answer, up to the next one; with_sys: the first turn and its system prompt, if they are mixed;
    past: what stands before an answer that was given, in place of what the last turn ends in.
    """

    bos: bool = False
    spec: bool = True
    always: str = ""
    sys: str = ""
    turn: str
    next: str
    with_sys: str | None = None
    past: tuple[str, str] = ("", "")
    no_sys: str = ""
    strips: bool = False


IM = "<|im_start|>user⏎Ⓤ<|im_end|>⏎<|im_start|>assistant⏎"
H3 = "<|start_header_id|>user<|end_header_id|>⏎⏎Ⓤ<|eot_id|>"
H3 += "<|start_header_id|>assistant<|end_header_id|>⏎⏎"
H4 = "<|header_start|>user<|header_end|>⏎⏎Ⓤ<|eot|><|header_start|>assistant<|header_end|>⏎⏎"
PHI3 = "<|user|>⏎Ⓤ<|end|>⏎<|assistant|>⏎"
PHI4 = "<|im_start|>user<|im_sep|>Ⓤ<|im_end|><|im_start|>assistant<|im_sep|>"
GEMMA = "<start_of_turn>user⏎Ⓤ<end_of_turn>⏎<start_of_turn>model⏎"
TURN = "<|START_OF_TURN_TOKEN|>"
COHERE = f"{TURN}<|USER_TOKEN|>Ⓤ<|END_OF_TURN_TOKEN|>{TURN}<|CHATBOT_TOKEN|>"
COHERE_SYS = f"{TURN}<|SYSTEM_TOKEN|>Ⓢ<|END_OF_TURN_TOKEN|>"
GRANITE3 = "<|start_of_role|>user<|end_of_role|>Ⓤ<|end_of_text|><|start_of_role|>assistant"
GRANITE3 += "<|end_of_role|>"
OSS = "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.⏎"
OSS += "Knowledge cutoff: 2024-06⏎Current date: 2026-03-04⏎⏎Reasoning: medium⏎⏎# Valid channels: "
OSS += "analysis, commentary, final. Channel must be included for every message.<|end|>"
SMOL = "<|im_start|>system⏎## Metadata⏎⏎Knowledge Cutoff Date: June 2025⏎"
SMOL += "Today Date: 04 March 2026⏎Reasoning Mode: /think⏎⏎## Custom Instructions⏎⏎"
LLAMA = Row(
    spec=False,
    turn="<s>[INST] Ⓤ [/INST]",
    next="<s>[INST] Ⓤ [/INST]",
    with_sys="<s>[INST] <<SYS>>⏎Ⓢ⏎<</SYS>>⏎⏎Ⓤ [/INST]",
)
CHATML = {"sys": "<|im_start|>system⏎Ⓢ⏎<|im_end|>⏎", "turn": IM, "next": f"<|im_end|>⏎{IM}"}
TABLE = {
    "raw": Row(bos=True, spec=False, sys="Ⓢ⏎", turn="User: Ⓤ⏎Bot:", next="User: Ⓤ⏎Bot:"),
    "llama": LLAMA,
    "codellama": LLAMA,
    "llama3": Row(
        bos=True,
        sys="<|start_header_id|>system<|end_header_id|>⏎⏎Ⓢ<|eot_id|>",
        turn=H3,
        next=f"<|eot_id|>{H3}",
    ),
    "phi3": Row(always="<s>", sys="<|system|>⏎Ⓢ<|end|>⏎", turn=PHI3, next=f"<|end|>⏎{PHI3}"),
    "chatml": Row(**CHATML),
    "tinyllama": Row(spec=False, **CHATML),
    "qwq": Row(sys=CHATML["sys"], turn=f"{IM}<think>⏎", next=f"<|im_end|>⏎{IM}<think>⏎"),
    "zephyr": Row(
        sys="<|system|>⏎Ⓢ⏎</s>⏎",
        turn="<|user|>⏎Ⓤ</s>⏎<|assistant|>⏎",
        next="<|user|>⏎Ⓤ</s>⏎<|assistant|>⏎",
    ),
    "deepseek": Row(
        sys="Ⓢ⏎", turn="### Instruction:⏎Ⓤ⏎### Response:⏎", next="### Instruction:⏎Ⓤ⏎### Response:⏎"
    ),
    "solar": Row(
        sys="### System⏎Ⓢ⏎⏎",
        turn="### User:⏎Ⓤ⏎⏎### Assistant:⏎",
        next="### User:⏎Ⓤ⏎⏎### Assistant:⏎",
    ),
    "openchat": Row(
        sys="Ⓢ<|end_of_turn|>",
        turn="GPT4 Correct User:Ⓤ<|end_of_turn|>GPT4 Correct Assistant:",
        next="GPT4 Correct User:Ⓤ<|end_of_turn|>GPT4 Correct Assistant:",
    ),
    "nous": Row(sys="Ⓢ⏎⏎", turn="USER:⏎Ⓤ⏎⏎ASSISTANT:⏎", next="USER:⏎Ⓤ⏎⏎ASSISTANT:⏎"),
    "gemma": Row(always="<bos>", turn=GEMMA, next=f"<end_of_turn>⏎{GEMMA}"),
    "cohere": Row(
        always="<BOS_TOKEN>", sys=COHERE_SYS, turn=COHERE, next=f"<|END_OF_TURN_TOKEN|>{COHERE}"
    ),
    "granite": Row(sys="System:⏎Ⓢ⏎⏎", turn="Question:⏎Ⓤ⏎⏎Answer:⏎", next="⏎⏎Question:⏎Ⓤ⏎⏎Answer:⏎"),
    "granite3": Row(
        bos=True,
        sys="<|start_of_role|>system<|end_of_role|>Ⓢ<|end_of_text|>",
        turn=GRANITE3,
        next=GRANITE3,
    ),
    "glm": Row(
        bos=True,
        always="[gMASK]<sop>",
        sys="<|system|>⏎Ⓢ",
        turn="<|user|>⏎Ⓤ<|assistant|>⏎",
        next="<|user|>⏎Ⓤ<|assistant|>⏎",
    ),
    # those below are not in the table of the original; written from what is published about them
    "mistral-v3": Row(
        bos=True,
        turn="[INST] Ⓤ[/INST]",
        next="</s>[INST] Ⓤ[/INST]",
        past=("", " "),
        with_sys="[INST] Ⓢ⏎⏎Ⓤ[/INST]",
    ),
    "mistral-v7": Row(
        bos=True,
        sys="[SYSTEM_PROMPT] Ⓢ[/SYSTEM_PROMPT]",
        turn="[INST] Ⓤ[/INST]",
        next="</s>[INST] Ⓤ[/INST]",
        past=("", " "),
    ),
    "mistral-v7-tekken": Row(
        bos=True,
        sys="[SYSTEM_PROMPT]Ⓢ[/SYSTEM_PROMPT]",
        turn="[INST]Ⓤ[/INST]",
        next="</s>[INST]Ⓤ[/INST]",
    ),
    "llama4": Row(
        bos=True,
        sys="<|header_start|>system<|header_end|>⏎⏎Ⓢ<|eot|>",
        turn=H4,
        next=f"<|eot|>{H4}",
        strips=True,
    ),
    "qwen3": Row(sys="<|im_start|>system⏎Ⓢ<|im_end|>⏎", turn=IM, next=f"<|im_end|>⏎{IM}"),
    "deepseek-r1": Row(
        bos=True,
        sys="Ⓢ",
        turn="<｜User｜>Ⓤ<｜Assistant｜><think>⏎",
        past=("<think>⏎", ""),
        next="<｜end▁of▁sentence｜><｜User｜>Ⓤ<｜Assistant｜><think>⏎",
    ),
    "gemma3": Row(
        bos=True,
        turn=GEMMA,
        next=f"<end_of_turn>⏎{GEMMA}",
        strips=True,
        with_sys=GEMMA.replace("Ⓤ", "Ⓢ⏎⏎Ⓤ"),
    ),
    "phi4": Row(sys="<|im_start|>system<|im_sep|>Ⓢ<|im_end|>", turn=PHI4, next=f"<|im_end|>{PHI4}"),
    "command-r": Row(
        bos=True, sys=COHERE_SYS, turn=COHERE, next=f"<|END_OF_TURN_TOKEN|>{COHERE}", strips=True
    ),
    "smollm3": Row(
        always=SMOL, sys="Ⓢ⏎⏎<|im_end|>⏎", no_sys="<|im_end|>⏎", turn=IM, next=f"<|im_end|>⏎{IM}"
    ),
    "gpt-oss": Row(
        always=OSS,
        sys="<|start|>developer<|message|># Instructions⏎⏎Ⓢ⏎⏎<|end|>",
        turn="<|start|>user<|message|>Ⓤ<|end|><|start|>assistant",
        next="<|end|><|start|>user<|message|>Ⓤ<|end|><|start|>assistant",
        past=("", "<|channel|>final<|message|>"),
    ),
    "alpaca": Row(
        bos=True,
        sys="Ⓢ⏎⏎",
        turn="### Instruction:⏎Ⓤ⏎⏎### Response:⏎",
        next="⏎⏎### Instruction:⏎Ⓤ⏎⏎### Response:⏎",
    ),
    "vicuna": Row(
        bos=True, sys="Ⓢ ", turn="USER: Ⓤ ASSISTANT:", next="</s>USER: Ⓤ ASSISTANT:", past=("", " ")
    ),
}


def written(name: str, system: str, turns: int) -> list[str]:
    """Return the text of a conversation by the table, cut where answers stand."""
    row, parts = TABLE[name], list[str]()
    for index in range(turns):
        user = USERS[index].strip() if row.strips else USERS[index]
        form = row.next if index else row.turn
        if not index and row.with_sys is not None and system:
            form = row.with_sys
        if not index:
            head = ("<s>" if row.bos else "") + row.always
            form = head + (row.sys if system else row.no_sys) + form
        if index < turns - 1:
            form = form.removesuffix(row.past[0]) + row.past[1]
        parts.append(form.replace("⏎", "\n").replace("Ⓢ", system).replace("Ⓤ", user))
    return parts


@cache
def reader(name: str) -> Reader:
    names = ("User", "Bot")
    return Reader(all_formats()[name], tokenizer_with(EVERY), names, now=NOW)


def messages(system: str, turns: int) -> list[Message]:
    found = [Message(role="system", content=system)] if system else []
    for user, answer in zip(USERS[:turns], ANSWERS, strict=False):
        found += [Message(role="user", content=user), Message(role="assistant", content=answer)]
    return found[:-1]


CASES = [(system, turns) for system in ("", SYSTEM) for turns in (1, 3)]


def test_the_table_has_every_format() -> None:
    assert set(TABLE) == set(all_formats())
    files = {path.stem for path in Path("engine/chat/formats").glob("*.jinja")}
    assert files == {row.file.stem for row in all_formats().values()}


@pytest.mark.parametrize("name", TABLE)
def test_text_is_that_of_the_table_and_as_transformers_renders_it(name: str) -> None:
    row = all_formats()[name]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer_with().backend, **tokens)
    ours = reader(name)
    for system, turns in CASES:
        parts = written(name, system, turns)
        expected = "".join(
            part + answer for part, answer in zip(parts, [*ANSWERS[: turns - 1], ""], strict=True)
        )
        made = ours.template
        text = made.render(
            messages(system, turns), add_generation_prompt=True, now=NOW, variables=ours._names
        )
        text = ours._marker.sub("<s>", text)
        listed = [{"role": m.role, "content": m.content} for m in messages(system, turns)]
        theirs = reference.apply_chat_template(
            listed,
            chat_template=row.template,
            tokenize=False,
            add_generation_prompt=True,
            user_name="User",
            bot_name="Bot",
        )

        assert text == expected
        today = datetime.now()
        for form in ("%d %B %Y", "%Y-%m-%d"):
            theirs = theirs.replace(today.strftime(form), NOW.strftime(form))
        assert theirs == expected


@pytest.mark.parametrize("name", TABLE)
def test_ids_are_those_of_the_text_with_the_generated_ids_of_answers(name: str) -> None:
    ours, row = reader(name), TABLE[name]
    tokenizer = tokenizer_with(EVERY)
    letters = [[tokenizer.encode(letter)[0] for letter in text] for text in ANSWERS]
    assert letters[0] != tokenizer.encode(ANSWERS[0])  # other ids of the same text
    for system, turns in CASES:
        talk = [
            Turn(user, Answer(ids=ids, text=answer))
            for user, answer, ids in zip(USERS[:turns], ANSWERS, letters, strict=False)
        ]
        expected: list[int] = []
        for index, part in enumerate(written(name, system, turns)):
            # what separates answers of `raw`; a mark before an answer without its thoughts
            part = "\n" + part if name == "raw" and index else part
            if name == "qwq" and index < turns - 1:
                part = part.removesuffix("<think>\n")
            pieces = re.split("(<s>)", part) if not row.spec else [part]
            for piece in pieces:
                special = row.spec or piece == "<s>"
                expected += tokenizer.encode(piece, special=special) if piece else []
            expected += letters[index] if index < turns - 1 else []

        ids, opened = ours.read(system, talk, cut=0)

        assert ids == expected
        assert opened == (name in ("qwq", "deepseek-r1"))
        bos = [i for i in ids if i == tokenizer.bos_token_id]
        assert len(bos) == (turns if row is LLAMA else row.bos or name == "phi3")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    tokenizer = tokenizer_with(EVERY)
    folder = make_tiny(
        "llama",
        tmp_path_factory.mktemp("model"),
        vocab_size=tokenizer.vocab_size + 2,
        max_position_embeddings=1024,
    )
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    return Generator(load_model(folder, device="cpu"), tokens=1024, slots=1)


@pytest.mark.parametrize("name", TABLE)
def test_every_stop_ends_an_answer(name: str, generator: Generator) -> None:
    session = Session(generator, all_formats()[name], names=("User", "Bot"), system="")
    stops = session._reader.stops
    assert 1 in stops  # the model's EOS
    assert len(stops) > (name not in ("llama", "codellama", "granite3", *MISTRAL))
    for stop in stops:
        if isinstance(stop, int):
            bias = ((stop, 1e4),)
            session.settings = SamplingSettings.greedy(token_bias=bias)
            session.filters, expected = (), ""
        elif stop in EVERY:  # ends it as a token
            continue
        else:
            session.settings = SamplingSettings.greedy()
            session.filters, expected = (PrefixFilter(f"Yes{stop} x"),), "Yes"

        session.clear()
        pieces = [*session.reply("A?")]

        turn = session.turns[-1]
        assert turn.current.ended, stop
        assert turn.answer + turn.thinking == expected
        assert "".join(piece.text for piece in pieces) == expected


MISTRAL = ("mistral-v3", "mistral-v7", "mistral-v7-tekken")


def test_stops_that_no_vocabulary_has_are_dropped() -> None:
    plain = Reader(all_formats()["phi3"], tokenizer_with(), ("User", "Bot"), now=NOW)
    raw = Reader(all_formats()["raw"], tokenizer_with(), ("Ada", "Bot"), now=NOW)

    assert plain.stops == (1,)
    assert raw.stops == (1, "Ada:", "A:", "ADA:", "ada:")


@pytest.mark.parametrize(
    ("marks", "name"),
    [
        (("<|im_start|>", "<|im_end|>"), "chatml"),
        (("<|im_start|>", "<|im_end|>", "<think>"), "qwen3"),
        (("<|im_start|>", "<|im_end|>", "<think>", "<|begin_of_text|>"), "smollm3"),
        (("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "phi4"),
        (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "llama3"),
        (("<start_of_turn>", "<end_of_turn>"), "gemma"),
        (("<start_of_turn>", "<end_of_turn>", "<start_of_image>"), "gemma3"),
        (("[INST]", "[/INST]"), "mistral-v3"),
        (("[INST]", "[/INST]", "[SYSTEM_PROMPT]"), "mistral-v7"),
        (("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "Ġthe "), "mistral-v7"),
        (("<|im_start|>",), "raw"),
        ((), "raw"),
    ],
)
def test_a_vocabulary_is_recognized_by_its_marks(
    marks: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    found, why = choose_format(tmp_path, tokenizer_with(marks))

    assert found.name == name
    assert f"format `{name}`" in why


def test_the_models_own_template_goes_first_and_has_the_stops_of_its_vocabulary(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    tokenizer = tokenizer_with(["<|im_start|>", "<|im_end|>"])

    found, why = choose_format(tmp_path, tokenizer)
    named, _ = choose_format(tmp_path, tokenizer, "alpaca")

    assert (found.template, found.stop_tokens, found.system) == ("{{ 1 }}", ("<|im_end|>",), "")
    assert why == "the model's own template, in `tokenizer_config.json`"
    assert named == all_formats()["alpaca"]


def test_a_file_is_a_format(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    found, why = choose_format(tmp_path, tokenizer_with(), str(file))

    assert (found.name, found.file) == ("mine.jinja", file)
    assert why == f"template `{file}`, as requested"


def test_an_unknown_format_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownPromptFormat, match=r"`lama3` is neither.*near are `llama3`"):
        choose_format(tmp_path, tokenizer_with(), "lama3")
    with pytest.raises(UnknownPromptFormat, match=r"there are `raw`, `llama`"):
        choose_format(tmp_path, tokenizer_with(), "qqqqqqqq")


def test_files_that_are_no_templates_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    (tmp_path / "b").write_text("{% for %}")
    broken, _ = choose_format(tmp_path, tokenizer_with(), str(tmp_path / "b"))

    with pytest.raises(ConfigError, match="cannot read the template"):
        choose_format(tmp_path, tokenizer_with(), str(tmp_path / "a"))
    with pytest.raises(ChatTemplateError, match="does not compile"):
        Session(scripted("a"), broken)  # type: ignore[arg-type]  # a stand-in
