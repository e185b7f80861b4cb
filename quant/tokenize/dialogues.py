"""Calibration rows of dialogues in the model's own chat template.

Two sources, evenly interleaved: dialogues written for this purpose, and texts of the standard set
as answers to a matching request. Each row begins with a dialogue.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import cycle
from pathlib import Path

from exl2flow.calibration_data import chat, standard
from exl2flow.core.errors import CalibrationError, ChatTemplateError, NotEnoughRows
from exl2flow.core.runtime.interrupt import look
from exl2flow.model import ChatTemplate, Message, Tokenizer
from exl2flow.quant.tokenize.cutting import Stream, cut, row_offsets
from exl2flow.quant.tokenize.mix import CalibrationRows, RowRequest, short_notes
from exl2flow.quant.tokenize.parquet import records

Dialogue = tuple[Message, ...]

NOW = datetime(2024, 7, 26)  # for templates that write the date: rows must not depend on the day
TURN = re.compile(r"^<(system|user|assistant)>$\n?", re.MULTILINE)
HEAD_SHARE = 0.2  # of a text to continue, how much the request quotes

ARTICLE_REQUESTS = (
    "Write an encyclopedia article about this subject: {title}",
    "What can you tell me about {title}? Please go into detail.",
    "{title}",
    "I need a few paragraphs on “{title}” for a reader who knows nothing about it.",
)
CONTINUE_REQUESTS: Mapping[str, tuple[str, ...]] = {
    "web": (
        "Continue this text in the same style:\n\n{head}",
        "{head}\n\nWrite the rest of this, please.",
    ),
    "code": (
        "Here is the beginning of a file in {language}. Write the rest of it.\n\n```\n{head}\n```",
        "Complete this code:\n\n```\n{head}\n```",
    ),
    "stories": (
        "Tell me a story. It should begin like this:\n\n{head}",
        "How might this story go on?\n\n{head}",
    ),
    "technical": (
        "Continue this document. Keep its format.\n\n{head}",
        "This was cut off. What follows?\n\n{head}",
    ),
}
CONTINUE_IN: Mapping[str, str] = {
    "ar": "أكمل هذا النص:",
    "de": "Schreibe diesen Text weiter:",
    "el": "Συνέχισε αυτό το κείμενο:",
    "es": "Continúa este texto:",
    "fi": "Jatka tätä tekstiä:",
    "fr": "Continue ce texte :",
    "he": "המשך את הטקסט הזה:",
    "hi": "इस पाठ को आगे लिखिए:",
    "id": "Lanjutkan teks ini:",
    "it": "Continua questo testo:",
    "ja": "この文章の続きを書いてください。",
    "ko": "이 글을 이어서 써 주세요.",
    "nl": "Schrijf deze tekst verder:",
    "pl": "Napisz dalszy ciąg tego tekstu:",
    "pt": "Continue este texto:",
    "ru": "Продолжи этот текст:",
    "sv": "Fortsätt den här texten:",
    "tr": "Bu metni devam ettir:",
    "uk": "Продовж цей текст:",
    "vi": "Hãy viết tiếp đoạn văn này:",
    "zh": "请续写这段文字：",
}


def dialogue_stream(template: ChatTemplate, tokenizer: Tokenizer) -> Stream:
    """Return the tokens of all dialogues as the template renders them, with BOS and other markup.

    Text that contains special tokens is left out: it would be read as markup.

    Raises:
        ChatTemplateError: the template refuses plain conversations.
    """
    added = tokenizer.backend.get_added_tokens_decoder().values()
    marks = [token.content for token in added if token.special]
    stream = Stream()
    for dialogue in alternated([list(written_dialogues()), *asked_for().values()]):
        look()
        if not any(mark in message.content for message in dialogue for mark in marks):
            stream.starts.append(len(stream.ids))
            stream.ids.extend(tokenizer.encode(render(template, dialogue), special=True))
    return stream


def chat_rows(stream: Stream, request: RowRequest) -> CalibrationRows:
    """Return rows that each begin with a dialogue of `dialogue_stream`.

    Raises:
        NotEnoughRows: the dialogues are shorter than one row.
    """
    count, length = request.rows, request.row_tokens
    if len(stream.ids) < length:
        raise NotEnoughRows(
            f"the dialogues have {len(stream.ids)} tokens with this tokenizer, one row needs "
            f"{length}; lower `row_tokens`"
        )
    offsets = row_offsets(stream, count, length)
    notes = short_notes("chat", len(stream.ids), offsets, length)
    rows = cut(stream, offsets, length, bos=None)
    return CalibrationRows(ids=rows, kinds=("chat",) * count, notes=tuple(notes))


def render(template: ChatTemplate, dialogue: Dialogue) -> str:
    """Render a dialogue; without a system turn in the template, its text joins the first user turn.

    Raises:
        ChatTemplateError: the template refuses the dialogue.
    """
    try:
        return template.render(dialogue, now=NOW)
    except ChatTemplateError:
        first, *rest = dialogue
        if first.role != "system" or not rest:
            raise
    asked = Message(role=rest[0].role, content=f"{first.content}\n\n{rest[0].content}")
    return template.render((asked, *rest[1:]), now=NOW)


def load_template(model_dir: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return a model's own template; if it has none, the error says what else to calibrate on."""
    return ChatTemplate.load(model_dir, tokenizer, otherwise="use another calibration than `chat`")


def check_template(template: ChatTemplate) -> None:
    """Render the shortest conversation, as an early check.

    Raises:
        ChatTemplateError: the template refuses it.
    """
    turns = (Message(role="user", content="Hello"), Message(role="assistant", content="Hello."))
    template.render(turns, now=NOW)


def read_dialogue(text: str) -> Dialogue:
    """Parse a dialogue whose turns begin with lines `<system>`, `<user>` or `<assistant>`.

    Raises:
        CalibrationError: the text does not begin with such a line.
    """
    before, *parts = TURN.split(text)
    if before.strip() or not parts:
        raise CalibrationError(f"a dialogue begins with a line `<user>`, not with {text[:40]!r}")
    return tuple(
        Message(role=role, content=content.strip("\n"))  # type: ignore[arg-type]  # TURN's words
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    )


def written_dialogues() -> Iterator[Dialogue]:
    """Yield the dialogues written for this purpose."""
    for (text,) in records(chat(), ["text"]):
        yield read_dialogue(text)


def asked_for(path: Path | None = None) -> dict[str, list[Dialogue]]:
    """Return kind → the standard set's texts as answers to requests, with rotating wordings."""
    dialogues: dict[str, list[Dialogue]] = {}
    wordings = {kind: cycle(texts) for kind, texts in CONTINUE_REQUESTS.items()}
    wordings["encyclopedia"] = cycle(ARTICLE_REQUESTS)
    for kind, language, text in records(path or standard(), ["kind", "language", "text"]):
        wording = next(wordings[kind]) if kind in wordings else CONTINUE_IN[language] + "\n\n{head}"
        dialogue = _as_answer(kind, language, text, wording=wording)
        if dialogue is not None:
            dialogues.setdefault(kind, []).append(dialogue)
    return dialogues


def alternated(sources: Iterable[Sequence[Dialogue]]) -> list[Dialogue]:
    """Merge the sources so that each is evenly spread over the whole."""
    positioned = [
        ((index + 0.5) / len(source), order, dialogue)
        for order, source in enumerate(sources)
        for index, dialogue in enumerate(source)
    ]
    return [dialogue for _, _, dialogue in sorted(positioned, key=lambda item: item[:2])]


def _as_answer(kind: str, language: str, text: str, *, wording: str) -> Dialogue | None:
    """Turn a text into a request and its answer; None if it has no second line or sentence."""
    if kind == "encyclopedia":
        title, _, body = text.partition("\n")
        return _exchange(wording.format(title=title), body.strip("\n"))
    begin = int(len(text) * HEAD_SHARE)
    cuts = [
        text.find(mark, begin) + len(mark) for mark in ("\n", ". ", "。") if mark in text[begin:]
    ]
    if not cuts:
        return None
    head, rest = text[: cuts[0]].rstrip(), text[cuts[0] :].strip("\n")
    answer = f"```\n{rest}\n```" if kind == "code" else rest
    return _exchange(wording.format(head=head, language=language), answer) if rest else None


def _exchange(question: str, answer: str) -> Dialogue:
    return Message(role="user", content=question), Message(role="assistant", content=answer)
