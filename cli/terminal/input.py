"""Reads the user's input: history, several lines, completion."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    NestedCompleter,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from exl2flow.core.store.files import PRIVATE, make_private_folder

QUOTES = '"""'  # around a message of several lines
FILES = PathCompleter(expanduser=True)
# command → the words that may follow; None: files
Words = Mapping[str, Callable[[], list[str]] | None]


class Leave(Exception):
    """The user has pressed Ctrl-D, or Ctrl-C twice, on an empty line, or Ctrl-C in an edit."""


class Typed:
    """Reads messages and commands from the terminal."""

    def __init__(
        self,
        name: str,
        words: Words,
        history: Path | None,
        *,
        say: Callable[[str], None] = print,
        source: Input | None = None,
        out: Output | None = None,
    ) -> None:
        """Prepare the prompt.

        Args:
            name: of the user, before the cursor.
            words: what completes commands.
            history: file of what was typed before; None: it is forgotten.
            say: prints a hint.
            source, out: replace the terminal, in tests.
        """
        self._name, self._say, self._pressed = name, say, False
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            key_bindings=_bindings(),
            completer=_Words(words),
            complete_while_typing=False,
            history=_history(history),
            input=source,
            output=out,
            prompt_continuation=lambda width, *_: " " * width,
        )

    def read(self, default: str | None = None) -> str:
        """Return what the user enters, without quotes around it.

        Args:
            default: text to edit, which Ctrl-C leaves.

        Raises:
            Leave: there is nothing more.
        """
        while True:
            prompt = FormattedText([("ansiyellow bold", f"{self._name}: ")])
            try:
                text = unbroken(self._session.prompt(prompt, default=default or ""))
            except EOFError:
                raise Leave from None
            except KeyboardInterrupt:
                is_empty = not self._session.default_buffer.text
                if default is not None or (is_empty and self._pressed):
                    raise Leave from None
                self._pressed = is_empty
                if is_empty:
                    self._say("press Ctrl-C again to leave, or Ctrl-D")
                continue
            self._pressed = False
            if text.startswith(QUOTES):
                text = text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")
            return text


def unbroken(text: str) -> str:
    """Replace the bytes of a paste that are not UTF-8, which the terminal gives as surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _bindings() -> KeyBindings:
    """Return our keys: Enter sends, Alt-Enter begins a line, quotes hold lines together."""
    keys = KeyBindings()

    @keys.add(Keys.Enter)
    def send(event: KeyPressEvent) -> None:
        text = event.current_buffer.text
        is_closed = len(text) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)
        if text.startswith(QUOTES) and not is_closed:
            event.current_buffer.newline(copy_margin=False)
        else:
            event.current_buffer.validate_and_handle()

    @keys.add(Keys.Escape, Keys.Enter)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add(Keys.BracketedPaste)
    def paste(event: KeyPressEvent) -> None:
        lines = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(unbroken(lines))

    return keys


class _Words(Completer):
    """Completes commands, their words, and files."""

    def __init__(self, words: Words) -> None:
        self._behind_slash = NestedCompleter(
            {
                name: FILES if row is None else WordCompleter(row, WORD=True)
                for name, row in words.items()
            }
        )

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """See prompt_toolkit."""
        slash, text = document.text_before_cursor[:1], document.text_before_cursor[1:]
        return self._behind_slash.get_completions(Document(text), event) if slash == "/" else ()


class _HistoryFile(FileHistory):
    """History in a file, with broken UTF-8 replaced, which could not be written."""

    def store_string(self, string: str) -> None:
        """See prompt_toolkit."""
        super().store_string(unbroken(string))


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        make_private_folder(path.parent)
        path.touch(mode=PRIVATE)
        path.open("ab").close()
    except OSError:  # a home that cannot be written
        return InMemoryHistory()
    return _HistoryFile(str(path))
