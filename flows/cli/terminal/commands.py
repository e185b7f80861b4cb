"""The commands of a chat: a table of small functions.

Each takes the chat and the text behind its name; it gives an answer to show, or nothing. Its
docstring is its help.
"""

import dataclasses
import inspect
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2flow.core.errors import ConfigError
from exl2flow.core.sampling import SamplingSettings
from exl2flow.flows.cli.loading import filters_of, read_adapters
from exl2flow.flows.cli.options.chat import nearest
from exl2flow.flows.cli.options.sampling import SAMPLING
from exl2flow.flows.cli.terminal.loop import Answer, Chat
from exl2flow.flows.cli.terminal.screen import DIM, summary

OFF = "off"


@dataclass(frozen=True, slots=True)
class Command:
    """`/NAME ARGUMENTS`; words: what completes the arguments, None: files."""

    run: Callable[[Chat, str], Answer]
    arguments: str
    words: Callable[[], Iterable[str]] | None

    @property
    def help(self) -> str:
        """What it does; the first line says it in short."""
        return inspect.getdoc(self.run) or ""


COMMANDS: dict[str, Command] = {}


def command(
    arguments: str = "", words: Callable[[], Iterable[str]] | None = tuple
) -> Callable[[Callable[[Chat, str], Answer]], Callable[[Chat, str], Answer]]:
    """Put a function into the table, under its own name."""

    def add(run: Callable[[Chat, str], Answer]) -> Callable[[Chat, str], Answer]:
        COMMANDS[run.__name__.strip("_")] = Command(run, arguments, words)
        return run

    return add


def obey(chat: Chat, text: str) -> Answer:
    """Run the command that a line without its slash names.

    Raises:
        ConfigError: there is none.
        Exl2FlowError: what it refuses.
    """
    name, _, argument = text.strip().partition(" ")
    found = COMMANDS.get(name)
    if found is None:
        names = {f"/{each}" for each in COMMANDS}
        raise ConfigError(f"there is no command `/{name}`{nearest(f'/{name}', names)}")
    return found.run(chat, argument.strip())


@command("[NAME]", lambda: COMMANDS)
def help(chat: Chat, argument: str) -> Answer:
    """Show all commands, or what one of them does."""
    name = argument.removeprefix("/")
    if not name:
        for each, one in COMMANDS.items():
            usage = f"/{each} {one.arguments}"
            chat.screen.say(f"{usage:<21}{one.help.partition(chr(10))[0]}")
        chat.screen.say('Alt-Enter or """ … """: several lines; Ctrl-C: stop; Ctrl-D: leave', DIM)
    elif name in COMMANDS:
        chat.screen.say(f"/{name} {COMMANDS[name].arguments}\n{COMMANDS[name].help}")
    else:
        raise ConfigError(f"there is no command `/{name}`{nearest(name, COMMANDS)}")
    return None


@command()
def retry(chat: Chat, argument: str) -> Answer:
    """Answer the last message again.

    The new answer has a new seed; `/back` brings the earlier one back.
    """
    return chat.session.retry()


@command()
def back(chat: Chat, argument: str) -> Answer:
    """Bring the answer before `/retry` back.

    Repeated, it shows all answers to the last message in turns.
    """
    chat.session.back()
    chat.keep()
    chat.screen.print(chat.session.turns[-1].answer)
    return None


@command("[N]")
def edit(chat: Chat, argument: str) -> Answer:
    """Change an earlier message, and answer it anew.

    N is the number of the turn, 1 for the first; without it the last one. Later turns are
    forgotten.
    """
    number = int(argument) if argument.isdecimal() else 0
    if (argument and number < 1) or not chat.session.turns[number - 1 :][:1]:
        raise ConfigError(f"there is no turn {argument or 1}; there are {len(chat.session.turns)}")
    text = chat.edited(chat.session.turns[number - 1].user)
    return chat.session.edit(number - 1, text)


@command()
def undo(chat: Chat, argument: str) -> Answer:
    """Take back the last message and its answer."""
    chat.session.undo()
    chat.keep()
    turns = len(chat.session.turns)
    chat.screen.say(f"{turns} turn{'s' * (turns != 1)} left", DIM)
    return None


@command()
def more(chat: Chat, argument: str) -> Answer:
    """Go on with the last answer, if it was stopped."""
    return chat.session.more()


@command("[TEXT]")
def system(chat: Chat, argument: str) -> Answer:
    """Show or change the system prompt.

    `/system off` goes on without one, `/system default` with that of the format.
    """
    if argument:
        chat.session.system = {OFF: "", "default": None}.get(argument, argument)
    chat.screen.say(chat.session.system or "no system prompt", DIM)
    return None


def _formats() -> Iterable[str]:
    from exl2flow.inference.chat import all_formats

    return all_formats()


@command("[NAME|FILE]", _formats)
def format(chat: Chat, argument: str) -> Answer:
    """Show or change the prompt format.

    It is a name, a file with a Jinja template, or `default`: the model's own.
    """
    from exl2flow.inference.chat import choose_format

    if argument:
        name = None if argument == "default" else argument
        tokenizer = chat.session.generator.model.tokenizer
        chat.session.format, why = choose_format(chat.model, tokenizer, name)
        chat.screen.say(why, DIM)
    else:
        chat.screen.say(f"{chat.session.format.name}; there are {', '.join(_formats())}", DIM)
    return None


# what `/set` changes besides the settings of the sampler: name → (kind, place)
SHOWN = {"thinking": ("show", "fold", "hide"), "plain": (True, False), "stats": (True, False)}
SWITCHES = {"on": True, "true": True, "yes": True, OFF: False, "false": False, "no": False}
OF_SESSION = ("max_answer", "amnesia", "keep_thinking")
SETTINGS = {row.field: row for row in SAMPLING[1]}


def _settable() -> list[str]:
    return [*SETTINGS, *OF_SESSION, *SHOWN]


@command("[NAME VALUE]", _settable)
def set_(chat: Chat, argument: str) -> Answer:
    """Show all settings, or change one.

    As in `/set temperature 0.7`, or `/set cfg_scale off`. Besides the settings of the sampler:
    `max_answer`, `amnesia`, `keep_thinking`, `thinking` (show, fold, hide), `plain` and `stats`.
    """
    name, _, text = argument.replace("=", " ").partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if not name:
        for each in _settable():
            chat.screen.say(f"{each} {_value(chat, each)}")
        return None
    if name not in _settable():
        raise ConfigError(f"there is no setting `{name}`{nearest(name, set(_settable()))}")
    if text:
        _change(chat, name, text)
    chat.screen.say(f"{name} {_value(chat, name)}", DIM)
    return None


def _value(chat: Chat, name: str) -> object:
    """Return what a setting is."""
    if name in SETTINGS:
        return getattr(chat.session.settings, name)
    if name == "max_answer":
        return chat.session.max_answer_tokens
    return getattr(
        chat if name == "stats" else chat.screen if name in SHOWN else chat.session, name
    )


def _change(chat: Chat, name: str, text: str) -> None:
    """Change a setting.

    Raises:
        ConfigError: it cannot have that value.
    """
    if name in SETTINGS:
        value = _number(name, text)
        chat.session.settings = dataclasses.replace(chat.session.settings, **{name: value})
    elif name == "max_answer":
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"`max_answer` is {text}; it must be 1 or more")
        chat.session.max_answer_tokens = int(text)
    elif name == "thinking":
        if text not in SHOWN["thinking"]:
            raise ConfigError(f"`thinking` is {text}; it must be show, fold or hide")
        chat.screen.thinking = text
    else:
        place = chat if name == "stats" else chat.screen if name in SHOWN else chat.session
        setattr(place, name, _switch(name, text))


def _switch(name: str, text: str) -> bool:
    if text.lower() not in SWITCHES:
        raise ConfigError(f"`{name}` is {text}; it must be on or off")
    return SWITCHES[text.lower()]


def _number(name: str, text: str) -> Any:
    """Return the value that a text spells, of the kind of the field's default."""
    default = next(f.default for f in dataclasses.fields(SamplingSettings) if f.name == name)
    if isinstance(default, bool):
        return _switch(name, text)
    if default is None and text == OFF:
        return None
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        raise ConfigError(f"`{name}` is {text}; it must be a number") from None


@command("[FOLDER …]", None)
def lora(chat: Chat, argument: str) -> Answer:
    """Show the number of adapters, or load others in their place.

    `/lora off` goes on without any.
    """
    if argument:
        folders = [] if argument == OFF else [Path(word).expanduser() for word in _split(argument)]
        chat.session.adapters = read_adapters(chat.session.generator.model, folders)
    count = len(chat.session.adapters)
    chat.screen.say(f"{count} adapter{'s' * (count != 1)}", DIM)
    return None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"cannot read `{text}`: {error}") from None


@command("[TEXT]")
def ban(chat: Chat, argument: str) -> Answer:
    """Show the texts that must not appear in answers, or ban one more.

    `/ban off` allows all of them again.
    """
    if argument:
        chat.session.bans = () if argument == OFF else (*chat.session.bans, argument)
    bans = ", ".join(f"`{each}`" for each in chat.session.bans)
    chat.screen.say(f"banned: {bans or 'nothing'}", DIM)
    return None


@command("FILE", None)
def json(chat: Chat, argument: str) -> Answer:
    """Make all answers match a JSON schema in a file.

    `/json off` ends that.
    """
    if not argument:
        raise ConfigError("give the file of a JSON schema, or `off`")
    schema = None if argument == OFF else str(Path(argument).expanduser())
    chat.session.filters = filters_of(json_schema=schema)
    chat.screen.say("answers match the schema" if schema else "answers are free", DIM)
    return None


@command()
def stats(chat: Chat, argument: str) -> Answer:
    """Show tokens, times and guesses of the last answer.

    `/set stats on` shows them after each answer.
    """
    chat.screen.say(summary(chat.session.statistics), DIM)
    return None


@command("[TEXT]")
def tokens(chat: Chat, argument: str) -> Answer:
    """Show how many tokens the model would read with a message.

    Of how many it can read; without a message, those of the conversation.
    """
    context = chat.session.generator.context
    chat.screen.say(f"{chat.session.count(argument)} of {context} tokens", DIM)
    return None


@command("FILE", None)
def save(chat: Chat, argument: str) -> Answer:
    """Write the conversation to a JSON file."""
    path = _file(argument)
    chat.session.save(path)
    chat.screen.say(f"saved to `{path}`", DIM)
    return None


@command("FILE", None)
def load(chat: Chat, argument: str) -> Answer:
    """Go on with a saved conversation in place of this one."""
    now = chat.session
    kept: dict[str, Any] = {
        "adapters": now.adapters,
        "filters": now.filters,
    }  # which are no part of a file
    chat.adopt(type(now).load(_file(argument), now.generator, **kept))
    chat.keep()
    return None


def _file(argument: str) -> Path:
    if not argument:
        raise ConfigError("give a file")
    return Path(argument).expanduser()


@command()
def clear(chat: Chat, argument: str) -> Answer:
    """Forget the conversation; settings and system prompt stay."""
    chat.session.clear()
    chat.keep()
    chat.screen.say("the conversation is empty", DIM)
    return None


@command()
def quit(chat: Chat, argument: str) -> Answer:
    """Leave, as Ctrl-D does; `--resume` goes on later."""
    chat.is_over = True
    return None
