"""`exl2flow chat`: a conversation with a model, in the terminal or through pipes."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.chat import PROFILES, ChatFiles
from exl2flow.flows.cli.console import OUT, emit_json, printable, say
from exl2flow.flows.cli.loading import filters_of, load, load_draft, read_adapters
from exl2flow.flows.cli.options import Values, with_options
from exl2flow.flows.cli.options.chat import (
    CHAT,
    SAMPLER,
    ChatConfig,
    build_chat,
    read_profile,
    remember,
    remembered,
)

if TYPE_CHECKING:  # these import torch
    from exl2flow.flows.cli.terminal.loop import Chat
    from exl2flow.inference import Generator
    from exl2flow.inference.chat import Piece

EXAMPLES = (
    "Examples:",
    "exl2flow chat ./Llama-3.2-1B-4.0bpw",
    "exl2flow chat ./model --system 'You are a pirate.' --temperature 0.7 --stats",
    "exl2flow chat ./model --resume",
    "exl2flow chat ./model --draft ./smaller-model --cache q6",
    "git diff | exl2flow chat ./model --system 'Write a commit message.' > message.txt",
)
KEPT = "chat.json"
OF_SESSION = {"max_answer": "max_answer_tokens", "ban": "bans"}
# variables of templates, for examples
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = {"user_name": "User", "bot_name": "Assistant"}


@with_options(*CHAT)
def chat(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="Model folder, EXL2 or plain.", show_default=False),
    ] = None,
    *,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Answer one message, from standard input, with one JSON object.",
        ),
    ] = False,
    formats: Annotated[
        bool,
        typer.Option("--formats", help="List the prompt formats, each with an example, and exit."),
    ] = False,
    files: ChatFiles,
    values: Values,
) -> None:
    """Chat with a model. /help lists the commands. In a pipe, standard input is one message."""
    if formats:
        _list_formats()
        return
    if model is None:
        raise ConfigError("give the folder of a model")
    if files.remember and files.profile is None:
        raise ConfigError("`--remember` goes with `--profile`")
    kept, origin = _of_profile(model, files.profile, keep=files.remember)
    given = {**kept, **values}
    try:
        config = build_chat(given, model)
    except ConfigError as error:
        build_chat(values, model)  # raises if not the profile is wrong
        raise ConfigError(f"{origin}: {error}") from error
    talks = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if talks:
        OUT.print(printable(f"loading {model} …"), style="dim", markup=False, soft_wrap=True)
    message = "" if talks else _message(model)
    file = files.conversation or (_kept(model) if talks or files.resume else None)
    at_work = _begin(model, config, given, file, resume=files.resume)
    if talks:
        _talk(at_work, config)
    else:
        _answer(at_work, message, as_json=as_json)


def _home(variable: str, default: str) -> Path:
    """Return our folder of a kind, by the XDG rules."""
    return Path(os.environ.get(variable) or Path.home() / default) / "exl2flow"


def _of_profile(model: Path, name: str | None, *, keep: bool) -> tuple[dict[str, object], str]:
    """Return the options of a profile, or of the one remembered for the model, and its name."""
    folder = _home("XDG_CONFIG_HOME", ".config")
    used = name or remembered(folder / KEPT, model)
    values = {} if used is None else read_profile(folder / PROFILES, used)
    if keep and name is not None:
        remember(folder / KEPT, model, name)
    return values, f"profile `{used}` in `{folder / PROFILES}`"


def _kept(model: Path) -> Path:
    """Return the file that keeps the last conversation with a model."""
    from exl2flow.core.store.files import digest_of, make_private_folder

    folder = _home("XDG_STATE_HOME", ".local/state")
    with suppress(OSError):  # a home that cannot be written, which is said with the first turn
        make_private_folder(folder)
    name = f"{model.resolve().name}-{digest_of(str(model.resolve()))[:8]}.json"
    return folder / "chats" / name


def _message(model: Path) -> str:
    """Return what comes through standard input, for a model that exists.

    Raises:
        ConfigError: nothing does.
        SourceModelError: there is no model.
    """
    from exl2flow.model import resolve  # imports torch

    resolve(model)
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    if "\ufffd" in text:
        say("bytes of standard input that are not UTF-8 were replaced", style="yellow")
    if not text.strip():
        raise ConfigError("standard input is empty; pipe a message into the command")
    return text.rstrip("\n")


def _begin(
    model: Path, config: ChatConfig, given: Values, file: Path | None, *, resume: bool
) -> "Chat":
    """Load the model, and begin a conversation or go on with that of the file."""
    from exl2flow.flows.cli.terminal.commands import obey
    from exl2flow.flows.cli.terminal.conversation_file import ConversationFile
    from exl2flow.flows.cli.terminal.loop import Chat
    from exl2flow.flows.cli.terminal.screen import Screen
    from exl2flow.inference import Generator
    from exl2flow.inference.chat import Session, choose_format

    chat, shared = config.chat, config.generation
    filters = filters_of(json_schema=shared.json_schema, regex=shared.regex, grammar=shared.grammar)
    loaded = load(model, shared, slots=1)
    format, why = choose_format(model, loaded.tokenizer, chat.format)
    draft = load_draft(shared, loaded)

    def generator() -> "Generator":
        return Generator(loaded, cache=shared.cache, slots=1, draft=draft)

    place = None if file is None else ConversationFile.take(file)  # before the file is read
    before = file if resume and file is not None and file.is_file() else None
    if resume and before is None:
        say(f"no conversation in `{file}` yet; a new one begins", style="yellow")
    options = _options(config, given, is_new=before is None)
    options |= {"adapters": read_adapters(loaded, shared.lora), "filters": filters}
    if before is None:
        session = Session(generator(), format, settings=config.sampling, **options)
    else:
        session = Session.load(before, generator(), format if chat.format else None, **options)
        why = why if chat.format else f"format `{session.format.name}`, as before"
        changed: dict[str, Any] = {k: v for k, v in given.items() if k in SAMPLER}
        session.settings = config.sampling if chat.greedy else replace(session.settings, **changed)
    screen = Screen(OUT)
    screen.thinking, screen.stats = chat.thinking, chat.stats
    screen.plain = chat.plain or OUT.is_dumb_terminal
    is_kept = before is not None
    if place is not None and not place.is_wanted:
        is_kept, note = False, f"another chat has `{place.wanted}`; this one is kept in"
        session.notes.append(f"{note} `{place.file}`")
    return Chat(
        session=session,
        screen=screen,
        model=model,
        file=place.file if place else None,
        place=place,
        restart=generator,
        why=why,
        obey=obey,
        is_kept=is_kept,
    )


def _options(config: ChatConfig, given: Values, *, is_new: bool) -> dict[str, Any]:
    """Return the arguments of a session; a file's conversation changes only what is given."""
    chat = config.chat
    options: dict[str, Any] = {
        "max_answer": chat.max_answer,
        "ban": config.generation.ban,
        "reserve": chat.reserve,
        "seed": chat.seed,
        "amnesia": chat.amnesia,
        "keep_thinking": chat.keep_thinking,
        "system": "" if chat.no_system else chat.system,
    }
    if not is_new:
        wanted = {*given, "system"} if chat.no_system else {*given}
        options = {name: value for name, value in options.items() if name in wanted}
    options = {OF_SESSION.get(name, name): value for name, value in options.items()}
    if is_new or given.keys() & {"user_name", "bot_name"}:
        options["names"] = (chat.user_name, chat.bot_name)
    return options


def _talk(at_work: "Chat", config: ChatConfig) -> None:
    """Talk with the user until they leave."""
    from exl2flow.flows.cli.terminal.commands import COMMANDS
    from exl2flow.flows.cli.terminal.input import Typed

    session, screen = at_work.session, at_work.screen
    words = {name: one.words for name, one in COMMANDS.items()}
    history = _home("XDG_STATE_HOME", ".local/state") / "chat-history"
    at_work.typed = Typed(config.chat.user_name, words, history, say=screen.say)
    screen.say(f"{at_work.model}; {at_work.why}; /help", "dim")
    if session.turns or session.notes:
        at_work.recall()
    at_work.run()


def _answer(at_work: "Chat", message: str, *, as_json: bool) -> None:
    """Answer one message on standard output, without control codes."""
    from exl2flow.flows.cli.terminal.screen import summary

    session = at_work.session
    for note in session.notes:
        say(note, style="yellow")
    if session.turns and session.turns[-1].is_unanswered:
        say("the message before this one has no answer", style="yellow")
    try:
        answer, thinking, ending = _received(at_work.reply(message), shows=not as_json)
    finally:
        at_work.keep()
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
        return
    if at_work.screen.stats:
        say(summary(counts), style="dim")


def _received(pieces: "Iterator[Piece]", *, shows: bool) -> tuple[str, str, list[str]]:
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


def _list_formats() -> None:
    """Print every format with a conversation in it."""
    from exl2flow.inference.chat import all_formats
    from exl2flow.model import ChatTemplate, Message

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
