"""The commands of a chat: a table of small functions.

Each takes the chat and the text behind its name; it gives an answer to show, a line to say, or
nothing. Its docstring is its help.
"""

import dataclasses
import inspect
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from rich.columns import Columns
from rich.text import Text

from exl2flow.cli.options.chat import CHAT
from exl2flow.cli.options.chat import SAMPLER as SAMPLED
from exl2flow.cli.terminal.conversation_file import unused
from exl2flow.cli.terminal.input import Leave
from exl2flow.cli.terminal.loop import Chat, Result
from exl2flow.cli.terminal.screen import DIM, counted, summary
from exl2flow.cli.work.loading import filters_of
from exl2flow.core import words
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.generation import ModelOptions
from exl2flow.engine import Adapter
from exl2flow.engine.chat import all_formats, choose_format

OFF = "off"
WORDS = {"True": "on", "False": OFF, "None": OFF}
Run = Callable[[Chat, str], Result]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """`/NAME ARGUMENTS`; words: what completes the arguments, None: files."""

    run: Run
    arguments: str
    words: Callable[[], list[str]] | None

    @property
    def help(self) -> str:
        """The function's docstring, whose first line is a summary."""
        return inspect.getdoc(self.run) or ""


HELP_COLUMN = 21  # of the terminal, in which the text of help begins
COMMANDS: dict[str, ChatCommand] = {}  # by name, with its slash


def command(
    arguments: str = "", words: Callable[[], list[str]] | None = list
) -> Callable[[Run], Run]:
    """Put a function into the table, under its own name."""

    def add(run: Run) -> Run:
        COMMANDS[f"/{run.__name__.strip('_')}"] = ChatCommand(run, arguments, words)
        return run

    return add


def obey(chat: Chat, text: str) -> Result:
    """Run the command that a line without its slash names.

    Raises:
        ConfigError: there is none.
        Exl2FlowError: what it refuses.
    """
    name, _, argument = text.strip().partition(" ")
    if f"/{name}" not in COMMANDS and (setting := name.replace("-", "_")) in SETTINGS:
        value = "on" if isinstance(attrgetter(SETTINGS[setting])(chat), bool) else "VALUE"
        raise ConfigError(f"`/{name}` is not a command but a setting: `/set {setting} {value}`")
    return _named(f"/{name}", COMMANDS, "command").run(chat, argument.strip())


def _named(name: str, table: Mapping[str, Found], what: str) -> Found:
    """Return an entry of a table; raises `ConfigError` if there is none of this name."""
    if name not in table:
        raise ConfigError(f"no {what} `{name}`{words.nearest(name, table)}")
    return table[name]


def _row(name: str, one: ChatCommand, width: int) -> str:
    """Return a line of help, wrapped below its text rather than below the name."""
    first, more = f"{name:<{HELP_COLUMN}}", " " * HELP_COLUMN
    text, width = one.help.partition("\n")[0], max(width, 2 * HELP_COLUMN)
    return fill(text, width, initial_indent=first, subsequent_indent=more)


@command("[NAME]", lambda: [name[1:] for name in COMMANDS])
def help(chat: Chat, argument: str) -> Result:
    """Show all commands, or what one of them does."""
    if argument:
        one = _named(name := f"/{argument.removeprefix('/')}", COMMANDS, "command")
        chat.screen.say(f"{name} {one.arguments}\n{one.help}")
        return None
    for name, one in COMMANDS.items():
        chat.screen.say(_row(f"{name} {one.arguments}", one, chat.screen.console.width))
    return 'Alt-Enter or """ … """: several lines; Ctrl-C: stop; Ctrl-D: leave'


@command()
def retry(chat: Chat, argument: str) -> Result:
    """Answer the last message again.

    The new answer has a new seed; `/back` brings the earlier one back.
    """
    return chat.session.retry()


@command()
def back(chat: Chat, argument: str) -> Result:
    """Bring the answer before `/retry` back.

    Repeated, it shows all answers to the last message in turns.
    """
    chat.session.back()
    chat.screen.print(chat.session.turns[-1].answer)
    return None


@command("[N]")
def edit(chat: Chat, argument: str) -> Result:
    """Change an earlier message, and answer it anew.

    N is the number of the turn, 1 for the first; without it the last one. Later turns are
    forgotten. Ctrl-C leaves all as it is.
    """
    turns = chat.session.turns
    numbers = [str(number) for number in range(1, len(turns) + 1)]
    if (number := argument or str(len(turns) or 1)) not in numbers:
        raise ConfigError(f"no turn {number:.20}; there are {len(turns)}")
    assert chat.typed is not None
    index, text = int(number) - 1, ""
    with suppress(Leave):
        text = chat.typed.read(default=turns[index].user)
    if not text.strip():
        raise ConfigError("nothing was edited")
    return chat.reply(text, index)


@command()
def undo(chat: Chat, argument: str) -> Result:
    """Take back the last message and its answer."""
    chat.session.undo()
    return f"{counted(len(chat.session.turns), 'turn')} left"


@command()
def more(chat: Chat, argument: str) -> Result:
    """Go on with the last answer, if it was stopped."""
    return chat.session.more()


@command("[TEXT]")
def system(chat: Chat, argument: str) -> Result:
    """Show or change the system prompt.

    `/system off` goes on without one, `/system default` with that of the format.
    """
    if argument:
        chat.session.system = {OFF: "", "default": None}.get(argument, argument)
    return chat.session.system or "no system prompt"


@command("[NAME|FILE]", lambda: [*all_formats()])
def format(chat: Chat, argument: str) -> Result:
    """Show or change the prompt format.

    It is a name, a file with a Jinja template, or `default`: the model's own.
    """
    if not argument:
        return f"{chat.session.format.name}; there are {', '.join(all_formats())}"
    name = None if argument == "default" else argument
    tokenizer = chat.session.generator.model.tokenizer
    chat.session.format, why = choose_format(chat.model, tokenizer, name)
    return why


# where a chat has what `/set` changes
SAMPLER = {field: f"session.settings.{field}" for field in SAMPLED}
SETTINGS = SAMPLER | {
    "max_answer": "session.max_answer_tokens",
    "amnesia": "session.amnesia",
    "keep_thinking": "session.keep_thinking",
    "thinking": "screen.thinking",
    "plain": "screen.plain",
    "stats": "screen.stats",
}


@command("[NAME VALUE]", lambda: [*SETTINGS])
def set_(chat: Chat, argument: str) -> Result:
    """Show all settings, or change one.

    As in `/set temperature 0.7`, or `/set mirostat on`. Besides settings of the sampler:
    `max_answer`, `amnesia`, `keep_thinking`, `plain` and `stats` (on or off), and
    `thinking` (show, fold or hide).
    """
    name, _, text = argument.replace("=", " ").partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if not name:
        rows = [Text(_setting(chat, each)) for each in SETTINGS]
        chat.screen.console.print(Columns(rows, padding=(0, 2), column_first=True), style=DIM)
        return None
    owner, _, attribute = _named(name, SETTINGS, "setting").rpartition(".")
    if text and name in SAMPLER:
        changed = {name: _parsed(name, text)}
        chat.session.settings = dataclasses.replace(chat.session.settings, **changed)
    elif text:
        setattr(attrgetter(owner)(chat), attribute, _parsed(name, text))
    return _setting(chat, name)


def _setting(chat: Chat, name: str) -> str:
    value = str(attrgetter(SETTINGS[name])(chat))
    return f"{name} {WORDS.get(value, value)}"


def _parsed(name: str, text: str) -> Any:
    """Return the value that a text spells for an option; raises `ConfigError`."""
    info = next(setting.info for setting in CHAT if setting.field == name)
    if info.default is None and text == OFF:
        return None
    kind: Any = Annotated[info.annotation, info]
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        problem = error.errors()[0]["msg"] if info.annotation is not bool else "give on or off"
        raise ConfigError(f"`{name}` is {text}: {problem[:1].lower()}{problem[1:]}") from None


@command("[FOLDER …]", None)
def lora(chat: Chat, argument: str) -> Result:
    """Show the number of adapters, or load others in their place.

    `/lora off` goes on without any.
    """
    if argument:
        try:
            folders = [] if argument == OFF else [_path(word) for word in shlex.split(argument)]
        except ValueError as error:
            raise ConfigError(f"cannot read `{argument}`: {error}") from None
        model = chat.session.generator.model
        chat.session.adapters = [Adapter.load(folder, model) for folder in folders]
    return counted(len(chat.session.adapters), "adapter")


def _path(text: str) -> Path:
    if not text:
        raise ConfigError("give a file")
    if "\0" in text:
        raise ConfigError(f"`{text}` is not a name of a file: it holds a NUL")
    return Path(text).expanduser()


@command("[TEXT]")
def ban(chat: Chat, argument: str) -> Result:
    """Show the texts that must not appear in answers, or ban one more.

    `/ban off` allows all of them again.
    """
    if argument:
        chat.session.bans = () if argument == OFF else (*chat.session.bans, argument)
    return f"banned: {', '.join(f'`{each}`' for each in chat.session.bans) or 'nothing'}"


@command("FILE", None)
def json(chat: Chat, argument: str) -> Result:
    """Make all answers match a JSON schema in a file.

    `/json off` ends that.
    """
    schema = None if argument == OFF else str(_path(argument))
    chat.session.filters = filters_of(ModelOptions(json_schema=schema))
    return "answers match the schema" if schema else "answers are free"


@command()
def stats(chat: Chat, argument: str) -> Result:
    """Show tokens, times and acceptance rate of the last answer.

    `/set stats on` shows them after each answer.
    """
    statistics = chat.session.statistics
    return summary(statistics) if statistics.context_tokens else "no answer yet"


@command("[TEXT]")
def tokens(chat: Chat, argument: str) -> Result:
    """Show how many tokens the model would read with a message.

    Of how many it can read; without a message, those of the conversation.
    """
    read = len(chat.session.context_ids(argument))
    return f"{read} of {chat.session.generator.context} tokens"


@command("FILE", None)
def save(chat: Chat, argument: str) -> Result:
    """Write the conversation to a JSON file, unless another chat has it."""
    path = _path(argument)
    is_own = Path(os.path.realpath(path)) == chat.file
    with nullcontext() if is_own else unused(path):
        chat.session.save(path)
    return f"saved to `{path}`"


@command("FILE", None)
def load(chat: Chat, argument: str) -> Result:
    """Go on with a saved conversation instead of this one, whose file is put aside."""
    now = chat.session  # adapters and filters are no part of a file
    options: dict[str, Any] = {"adapters": now.adapters, "filters": now.filters}
    chat.session = type(now).load(_path(argument), now.generator, **options)
    chat.is_kept = False
    chat.recall()
    return None


@command()
def clear(chat: Chat, argument: str) -> Result:
    """Begin a new conversation; settings and system prompt stay.

    The file of this one is put aside with the next message.
    """
    chat.session.clear()
    chat.is_kept = False
    return "the conversation is empty"


@command()
def quit(chat: Chat, argument: str) -> Result:
    """Leave, as Ctrl-D does; `--resume` goes on later."""
    chat.is_over = True
    return None
