"""A chat at work: reads what the user types, answers it or obeys it, and keeps the conversation."""

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from exl2flow.cli.output.failures import FAILURES, of_the_machine
from exl2flow.cli.terminal.conversation_file import put_aside
from exl2flow.cli.terminal.input import Leave, Typed
from exl2flow.cli.terminal.screen import (
    DIM,
    ERROR,
    NAME,
    NOTE,
    Screen,
    counted,
    summary,
    without_echo,
)
from exl2flow.core.errors import ConfigError, Exl2FlowError, WriteFailed
from exl2flow.core.requests.conversation import Turn
from exl2flow.engine import Generator
from exl2flow.engine.chat import Piece, Session

NAMED = "raw"  # the format of a log, whose answers begin with a name
Result = Iterator[Piece] | str | None  # of a command: an answer, a line, or nothing to show


@dataclass(kw_only=True)
class Chat:
    """A conversation in the terminal.

    model: the model's folder; file: where the conversation is written, before and after each
    answer; restart: makes a new generator after one has failed; obey: runs a command; typed: None
    where no terminal is; why: a sentence about the format; is_kept: whether the file holds this
    conversation.
    """

    session: Session
    screen: Screen
    model: Path
    file: Path | None
    restart: Callable[[], Generator]
    obey: "Callable[[Chat, str], Result]"
    typed: Typed | None = None
    why: str = ""
    is_kept: bool = False
    is_over: bool = False

    def run(self) -> None:
        """Talk until the user leaves."""
        assert self.typed is not None
        with without_echo(), suppress(Leave):
            while not self.is_over:
                if (text := self.typed.read()).strip():
                    self.take(text)

    def take(self, text: str) -> None:
        """Answer a message or obey a command; what fails is one line, and the chat goes on."""
        failure, is_broken = "", False
        is_command = text.startswith("/") and "\n" not in text
        try:
            try:
                result = self._obeyed(text[1:]) if is_command else self.reply(text)
                if isinstance(result, str):
                    self.screen.say(result, DIM)
                elif result is not None:
                    self.answer(result)
            finally:
                self.keep()
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

    def _obeyed(self, line: str) -> Result:
        """Run a command; a value that it cannot use is the user's mistake."""
        try:
            return self.obey(self, line)
        except ValueError as error:
            raise ConfigError(f"`/{line:.40}`: {error}") from error

    def reply(self, text: str, number: int | None = None) -> Iterator[Piece]:
        """Return the answer to a message.

        The message is written to the file before the answer begins, unless it replaces answers: a
        crash must not cost them, so the file keeps them until the new answer ends.

        Args:
            text: the message.
            number: index of the turn that it replaces; later ones are forgotten. None: a new one.
        """
        session = self.session
        pieces = session.reply(text) if number is None else session.edit(number, text)
        turns = session.turns
        replaced = [] if number is None else turns[number:]
        if not all(turn.is_unanswered for turn in replaced):
            return pieces
        session.turns = [*turns[:number], Turn(text)]
        try:
            with suppress(WriteFailed):  # which is said behind the answer
                self.keep()
        finally:
            session.turns = turns
        return pieces

    def answer(self, pieces: Iterator[Piece]) -> None:
        """Show an answer, and what the user may want to know about it."""
        self.screen.name = self.session.names[1] if self.session.format.name == NAMED else ""
        self.screen.show(pieces)
        if self.session.turns and not self.session.turns[-1].current.ended:
            self.screen.say("`/more` goes on, `/retry` answers anew", NOTE)
        if self.screen.stats:
            self.screen.say(summary(self.session.statistics), DIM)
        self.screen.say("")

    def keep(self) -> None:
        """Write the conversation, whole or not at all; an earlier one's file is put aside."""
        if self.file is None or not (self.is_kept or self.session.turns):
            return
        if not self.is_kept:
            put_aside(self.file)
        self.session.save(self.file)
        self.is_kept = True

    def recall(self) -> None:
        """Show where the conversation stands."""
        session = self.session
        for note in session.notes:
            self.screen.say(note, NOTE)
        self.screen.say(counted(len(session.turns), "turn"), DIM)
        if session.turns:
            turn, (user, bot) = session.turns[-1], session.names
            self.screen.say(f"{user}: {turn.user}")
            if turn.is_unanswered:
                self.screen.say(
                    "no answer yet: `/retry` answers, `/edit` changes the message", NOTE
                )
            else:
                self.screen.say(f"{bot}:", NAME)
                self.screen.say(turn.answer, DIM)
