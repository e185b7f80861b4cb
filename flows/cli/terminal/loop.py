"""A chat at work: reads what the user types, answers it or obeys it, and keeps the conversation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from exl2flow.core.errors import ConfigError, Exl2FlowError
from exl2flow.flows.cli.failures import FAILURES, of_the_machine
from exl2flow.flows.cli.terminal.input import Leave, Typed
from exl2flow.flows.cli.terminal.screen import DIM, ERROR, NOTE, Screen, summary, without_echo

if TYPE_CHECKING:  # these import torch
    from exl2flow.inference import Generator
    from exl2flow.inference.chat import Piece, Session

Answer = Iterator["Piece"] | None  # what a command gives: an answer to show, or nothing


@dataclass(kw_only=True)
class Chat:
    """A conversation in the terminal.

    model: the model's folder; file: where the conversation is written after each turn; restart:
    makes a new generator after one has failed; typed: None where no terminal is; why: a sentence
    about the format.
    """

    session: "Session"
    screen: Screen
    model: Path
    file: Path | None
    restart: "Callable[[], Generator]"
    typed: Typed | None = None
    stats: bool = False
    why: str = ""
    obey: "Callable[[Chat, str], Answer]" = field(default=lambda chat, text: None)
    is_over: bool = False

    def run(self) -> None:
        """Talk until the user leaves."""
        assert self.typed is not None
        with without_echo():
            while not self.is_over:
                try:
                    text = self.typed.read()
                except Leave:
                    break
                if text.strip():
                    self.take(text)

    def take(self, text: str) -> None:
        """Answer a message or obey a command; what fails is one line, and the chat goes on."""
        try:
            is_command = text.startswith("/") and "\n" not in text
            pieces = self.obey(self, text[1:]) if is_command else self.session.reply(text)
            if pieces is not None:
                self.answer(pieces)
        except Exl2FlowError as error:
            self._failed(str(error))
        except FAILURES as error:
            if (message := of_the_machine(error)) is None:
                raise
            self._failed(message)

    def answer(self, pieces: "Iterator[Piece]") -> None:
        """Show an answer, and write the conversation."""
        try:
            self.screen.show(pieces)
        finally:
            self.keep()
        if self.stats:
            self.screen.say(summary(self.session.statistics), DIM)

    def keep(self) -> None:
        """Write the conversation, whole or not at all."""
        if self.file is not None:
            self.session.save(self.file)

    def adopt(self, session: "Session") -> None:
        """Go on with another conversation."""
        self.session = session
        for note in session.notes:
            self.screen.say(note, NOTE)
        turns = len(session.turns)
        self.screen.say(f"{turns} turn{'s' * (turns != 1)}", DIM)
        if turns:
            self.screen.say(f"{session.names[0]}: {session.turns[-1].user}")
            self.screen.say(session.turns[-1].answer, DIM)

    def edited(self, text: str) -> str:
        """Let the user edit a text.

        Raises:
            ConfigError: there is no terminal, or the user leaves.
        """
        if self.typed is None:
            raise ConfigError("texts are edited in a terminal only")
        try:
            return self.typed.read(default=text)
        except Leave:
            raise ConfigError("nothing was edited") from None

    def _failed(self, message: str) -> None:
        self.screen.say(f"error: {message}", ERROR)
        if self.session.generator.failure is not None:
            self.screen.say("the model is made ready again", NOTE)
            self.session.generator = self.restart()
