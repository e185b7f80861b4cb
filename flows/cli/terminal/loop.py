"""A chat at work: reads what the user types, answers it or obeys it, and keeps the conversation."""

import gc
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

NAMED = "raw"  # the format of a log, whose answers begin with a name
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
        failure, is_broken = "", False
        try:
            is_command = text.startswith("/") and "\n" not in text
            pieces = self.obey(self, text[1:]) if is_command else self.session.reply(text)
            if pieces is not None:
                self.answer(pieces)
        except Exl2FlowError as error:
            failure = f"error: {error}"
        except FAILURES as error:
            if (message := of_the_machine(error)) is None:
                raise
            failure = f"error: {message}"
        except KeyboardInterrupt:  # the second one, which may come in the middle of a step
            failure, is_broken = "stopped at once", True
        if failure:
            self.screen.say(failure, ERROR)
        if is_broken or self.session.generator.failure is not None:
            self.screen.say("what the model had read is read again with the next message", NOTE)
            del self.session.generator  # before its successor needs the memory of its cache
            gc.collect()
            self.session.generator = self.restart()

    def answer(self, pieces: "Iterator[Piece]") -> None:
        """Show an answer, and write the conversation."""
        self.screen.name = self.session.names[1] if self.session.format.name == NAMED else ""
        try:
            self.screen.show(pieces)
        finally:
            self.keep()
        if self.session.turns and not self.session.turns[-1].current.ended:
            self.screen.say("`/more` goes on, `/retry` answers anew", NOTE)
        if self.stats:
            self.screen.say(summary(self.session.statistics), DIM)
        self.screen.say("")

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
