"""Begins a chat, in the terminal or for one message of a pipe."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from exl2flow.cli.options import Values
from exl2flow.cli.options.chat import SAMPLER, ChatConfig, home
from exl2flow.cli.output.console import OUT, emit_json, printable, say
from exl2flow.cli.terminal.commands import COMMANDS, obey
from exl2flow.cli.terminal.conversation_file import reserved
from exl2flow.cli.terminal.input import Typed
from exl2flow.cli.terminal.loop import Chat
from exl2flow.cli.terminal.screen import Screen, summary
from exl2flow.cli.work.loading import filters_of, load, prompt_cache, with_own_draft
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.chat import ChatFiles
from exl2flow.core.store.files import digest_of, make_private_folder
from exl2flow.engine import Adapter, Generator
from exl2flow.engine.chat import Piece, Session, all_formats, choose_format
from exl2flow.engine.drafts import Drafter
from exl2flow.model import ChatTemplate, Message, resolve

STATE = ("XDG_STATE_HOME", ".local/state")
# options of other names → arguments of a session
OF_SESSION = {
    "max_answer": "max_answer_tokens",
    "ban": "bans",
    "user_name": "names",
    "bot_name": "names",
}
# variables of templates, for examples
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = {"user_name": "User", "bot_name": "Assistant"}


def talk(model: Path, key: str, config: ChatConfig, given: Values, files: ChatFiles) -> None:
    """Talk with the user until they leave; `given` are the options that are no defaults.

    model: its folder. key: the same, or its name on the Hub.
    """
    file = files.conversation or _file_of(key)
    with _begun(model, config, given, file, resume=files.resume) as chat:
        session, screen = chat.session, chat.screen
        words = {name[1:]: one.words for name, one in COMMANDS.items()}
        history = home(*STATE) / "chat-history"
        chat.typed = Typed(config.chat.user_name, words, history, say=screen.say)
        name = model if key == str(model.resolve()) else key
        screen.say(f"{name}; {chat.why}; /help", "dim")
        if session.turns or session.notes:
            chat.recall()
        chat.run()


def answer_one(
    model: Path, key: str, config: ChatConfig, given: Values, files: ChatFiles, *, as_json: bool
) -> None:
    """Answer the message on standard input on standard output, without control codes."""
    message = _message(model)
    file = files.conversation or (_file_of(key) if files.resume else None)
    with _begun(model, config, given, file, resume=files.resume) as chat:
        session = chat.session
        for note in session.notes:
            say(note, style="yellow")
        if session.turns and session.turns[-1].is_unanswered:
            say("the message before this one has no answer", style="yellow")
        try:
            answer, thinking, ending = _received(chat.reply(message), shows=not as_json)
        finally:
            chat.keep()
    counts, turn = session.statistics, session.turns[-1].current
    for note in [*ending, *["`--max-answer` allows more"] * (not turn.ended)]:
        say(note, style="yellow")
    if as_json:
        emit_json(
            {
                "format": session.format.name,
                "system": session.system,
                "message": message,
                "thinking": thinking,
                "answer": answer,
                "tokens": turn.ids,
                "seed": turn.seed,
                "statistics": asdict(counts),
            }
        )
    elif chat.screen.stats:
        say(summary(counts), style="dim")


def _file_of(key: str) -> Path:
    """Return the file that keeps the last conversation with a model."""
    folder = home(*STATE)
    with suppress(OSError):  # a home that cannot be written, which is said with the first turn
        make_private_folder(folder)
    name = f"{key.rpartition('/')[2]}-{digest_of(key)[:8]}.json"
    return folder / "chats" / name


def _message(model: Path) -> str:
    """Return what comes through standard input; raises `ConfigError` if nothing does."""
    resolve(model)  # which is refused first, if it is none
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    if "\ufffd" in text:
        say("bytes of standard input that are not UTF-8 were replaced", style="yellow")
    if not text.strip():
        raise ConfigError("standard input is empty; pipe a message into the command")
    return text.rstrip("\n")


@contextmanager
def _begun(
    model: Path, config: ChatConfig, given: Values, wanted: Path | None, *, resume: bool
) -> Iterator[Chat]:
    """Load the model, and begin a conversation or go on with that of the file."""
    chat, shared = config.chat, config.generation
    filters, keep = filters_of(shared), prompt_cache(shared)
    loaded = load(model, shared, slots=1)
    format, why = choose_format(model, loaded.tokenizer, chat.format)

    def made(draft: Drafter | None) -> Generator:
        return Generator(loaded, cache=shared.cache, slots=1, draft=draft, keep=keep)

    generator = with_own_draft(shared, loaded, made)
    # before the file is read
    with nullcontext() if wanted is None else reserved(wanted) as file:
        before = wanted if resume and wanted is not None and wanted.is_file() else None
        if resume and before is None:
            say(f"no conversation in `{wanted}` yet; a new one begins", style="yellow")
        options = _options(config, given, is_new=before is None)
        options["adapters"] = [Adapter.load(folder, loaded) for folder in shared.lora]
        options["filters"] = filters
        if before is None:
            session = Session(generator(), format, settings=config.sampling, **options)
        else:
            as_before = None if chat.format is None else format
            session = Session.load(before, generator(), as_before, **options)
            why = why if chat.format else f"format `{session.format.name}`, as before"
            changed: dict[str, Any] = {k: v for k, v in given.items() if k in SAMPLER}
            settings = replace(session.settings, **changed)
            session.settings = config.sampling if chat.greedy else settings
        screen = Screen(OUT)
        screen.thinking, screen.stats = chat.thinking, chat.stats
        screen.plain = chat.plain or OUT.is_dumb_terminal
        is_kept = before is not None
        if wanted is not None and file != Path(real := os.path.realpath(wanted)):
            is_kept = False
            session.notes.append(f"another chat has `{real}`; this one is kept in `{file}`")
        try:
            yield Chat(
                session=session,
                screen=screen,
                model=model,
                file=file,
                restart=generator,
                why=why,
                obey=obey,
                is_kept=is_kept,
            )
        finally:
            if (last := vars(session).get("generator")) is not None:  # it may have failed
                last.close()


def _options(config: ChatConfig, given: Values, *, is_new: bool) -> dict[str, Any]:
    """Return the arguments of a session; a file's conversation changes only what is given."""
    chat = config.chat
    options: dict[str, Any] = {
        "max_answer_tokens": chat.max_answer,
        "bans": config.generation.ban,
        "reserve": chat.reserve,
        "seed": chat.seed,
        "amnesia": chat.amnesia,
        "keep_thinking": chat.keep_thinking,
        "system": "" if chat.no_system else chat.system,
        "names": (chat.user_name, chat.bot_name),
    }
    if is_new:
        return options
    wanted = {OF_SESSION.get(name, name) for name in given}
    if chat.no_system:
        wanted.add("system")
    return {name: value for name, value in options.items() if name in wanted}


def _received(pieces: Iterator[Piece], *, shows: bool) -> tuple[str, str, list[str]]:
    """Return an answer, its thoughts, and the notes that come behind its last line.

    shows: write the answer to standard output; its last line ends even if the answer fails.
    """
    texts = {"answer": "", "thinking": ""}
    ending, is_open = list[str](), False
    try:
        for piece in pieces:
            if piece.kind == "note" and texts["answer"]:
                ending.append(piece.text)
            elif piece.kind == "note":
                say(piece.text, style="yellow")
            else:
                texts[piece.kind] += piece.text
            if shows and piece.kind == "answer":
                sys.stdout.write(printable(piece.text))
                sys.stdout.flush()
                is_open = not texts["answer"].endswith("\n")
        is_open |= not texts["answer"]  # an empty answer is an empty line
    finally:
        if shows and is_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return texts["answer"], texts["thinking"], ending


def list_formats() -> None:
    """Print every format with a conversation in it."""
    for name, format in all_formats().items():
        messages = [
            Message(role="system", content="Be brief."),
            Message(role="user", content="Hello"),
            Message(role="assistant", content="Hi!" + format.ending),
            Message(role="user", content="Bye"),
        ]
        template = ChatTemplate(format.template, special_tokens=TOKENS, origin=format.file)
        text = template.render(messages, add_generation_prompt=True, variables=NAMES)
        OUT.print(name, style="bold")
        OUT.print(printable(text), markup=False, soft_wrap=True)
        OUT.print()
