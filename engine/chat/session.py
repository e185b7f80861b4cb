"""A conversation with a model: messages in, pieces of answers out, within the model's context."""

import hashlib
from collections.abc import Generator as Generated
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from threading import Event as Flag
from typing import Any, Self

from exl2flow.core.errors import ConfigError, Exl2FlowError, InferenceError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.conversation import (
    Answer,
    Conversation,
    PromptFormat,
    Turn,
    messages_of,
)
from exl2flow.core.requests.images import refuse_images
from exl2flow.core.requests.request import AdapterLike, Filter, Request
from exl2flow.engine.chat.answering import Answering, ChatStatistics, End, Piece, Reply, Resumed
from exl2flow.engine.chat.formats import choose_format
from exl2flow.engine.chat.history import Context, Reader
from exl2flow.engine.generate import Generator
from exl2flow.model.tensor_parallel.ranks import Ranks

MOST_DRAWN = 10**7  # by an answer: hours of work, whose draws are passed over in 0.2 s
ROWS = 8  # of the embedding, in the fingerprint of a model
# in a file, under the names of the attributes, which are arguments as well
STORED = (
    "settings",
    "seed",
    "max_answer_tokens",
    "reserve",
    "bans",
    "amnesia",
    "keep_thinking",
    "names",
    "started",
)


class Session:
    """A conversation.

    turns: all of them, also the ones that the model no longer reads. settings, bans,
    filters, adapters, max_answer_tokens, amnesia and keep_thinking may be changed between answers.
    notes: what loading a file could not keep.
    """

    def __init__(
        self,
        generator: Generator,
        fmt: PromptFormat,
        *,
        system: str | None = None,
        settings: SamplingSettings | None = None,
        seed: int | None = None,
        max_answer_tokens: int = 1000,
        reserve: int = 250,
        adapters: Sequence[AdapterLike] = (),
        bans: Sequence[str] = (),
        filters: Sequence[Filter] = (),
        amnesia: bool = False,
        keep_thinking: bool = False,
        names: tuple[str, str] = ("User", "Assistant"),
        started: datetime | None = None,
    ) -> None:
        """Begin a conversation.

        Args:
            generator: what answers.
            fmt: how the conversation is written for the model.
            system: the system prompt; "": none; None: the format's.
            settings: of the sampler.
            seed: of the first answer; the next ones have the next seeds. None: a new one, the same
                on all ranks.
            max_answer_tokens: after which an answer stops; `more` goes on.
            reserve: tokens of the context that are free when an answer begins, at most half of it.
            adapters, bans, filters: of all answers, as in `Request`.
            amnesia: read the last message only.
            keep_thinking: read the thoughts of earlier answers as well.
            names: of the user and of the model, in the format `raw`.
            started: the date that templates see; None: the present.

        Raises:
            ConfigError: a value is out of range.
            ChatTemplateError: the format's template is not Jinja.
        """
        if len({_checked(name).strip() for name in names} - {""}) != 2:
            raise ConfigError(f"`names` is {names!r}; give two different names")
        self.generator, self.reserve, self.names = generator, reserve, names
        self.settings, self.max_answer_tokens = settings or SamplingSettings(), max_answer_tokens
        self.seed = Ranks.new_seed() % 2**31 if seed is None else seed
        self.adapters, self.bans, self.filters = adapters, bans, filters
        self.amnesia, self.keep_thinking = amnesia, keep_thinking
        self.started = started or datetime.now().replace(microsecond=0)
        self.turns: list[Turn] = []
        self.notes: list[str] = []
        self.asked = 0  # answers that were begun: each has a seed of its own
        self.statistics = ChatStatistics()
        self._running: Generated[Piece] | None = None
        self.system = system
        self.format = fmt
        self._request([0], Answer(seed=self.seed))  # raises what is out of range

    @property
    def format(self) -> PromptFormat:
        """The prompt format of the conversation."""
        return self._reader.format

    @format.setter
    def format(self, fmt: PromptFormat) -> None:
        tokenizer = self.generator.model.tokenizer
        self._reader = Reader(fmt, tokenizer, self.names, now=self.started)

    @property
    def system(self) -> str:
        """The system prompt; setting None brings back that of the format."""
        if self._system is not None:
            return self._system
        user, bot = self.names
        return self.format.system.replace("{user}", user).replace("{bot}", bot)

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = None if text is None else _checked(text)

    def reply(self, text: str) -> Reply:
        """Send a message, and yield its answer; closing the iterator ends the answer there.

        Setting its `abort_event` does so before the next piece comes, too.

        Raises:
            Exl2FlowError: the answer failed; without any text of it the conversation is as before.
        """
        self.stop()
        return self._run(Turn(_checked(text)), self.turns)

    def edit(self, number: int, text: str) -> Reply:
        """Replace the message of a turn (0: the first, -1: the last) and drop later turns."""
        self._turn(number)
        return self._run(Turn(_checked(text)), self.turns[: number % len(self.turns)])

    def retry(self) -> Reply:
        """Answer the last message again, with a new seed; `back` brings the earlier answer back."""
        old = self._turn(-1)
        earlier = [] if old.is_unanswered else [old.current]
        turn = Turn(old.user, alternatives=[*old.alternatives, *earlier], cut=old.cut)
        return self._run(turn, self.turns[:-1])

    def more(self) -> Reply:
        """Go on with the last answer, where it was stopped or closed, or begin it."""
        if (turn := self._turn(-1)).current.ended:
            raise ConfigError("the last answer is complete; there is no more of it")
        return self._run(turn, self.turns[:-1], goes_on=not turn.is_unanswered)

    def back(self) -> None:
        """Switch to the previous answer; call again to switch back."""
        turn = self._turn(-1)
        if not turn.alternatives:
            raise ConfigError("the last message has one answer only; ask for another one first")
        turn.alternatives.insert(0, turn.current)
        turn.current = turn.alternatives.pop()

    def undo(self) -> Turn:
        """Take the last message and its answer back, and return them."""
        self._turn(-1)
        return self.turns.pop()

    def clear(self) -> None:
        """Forget all turns."""
        self.stop()
        self.turns.clear()

    def stop(self) -> None:
        """End the answer under way, as closing its iterator does."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _turn(self, number: int) -> Turn:
        self.stop()
        if not -len(self.turns) <= number < len(self.turns):
            if not self.turns:
                raise ConfigError("no turn yet; send a message first")
            raise ConfigError(f"no turn {number}; the last one is {len(self.turns) - 1}")
        return self.turns[number]

    @property
    def _limit(self) -> int:
        return min(self.generator.context, self.generator.pages * self.generator.page_tokens)

    @property
    def _room(self) -> int:
        return self._limit - min(self.reserve, self._limit // 2)

    def context_ids(self, text: str = "") -> list[int]:
        """Return the ids that the model would read before it answers a message.

        Raises:
            ContextOverflow, ChatTemplateError: as `reply`.
        """
        turns = [] if self.amnesia else self.turns
        return self._context([*turns, Turn(_checked(text))], self._room).ids

    def _context(self, turns: Sequence[Turn], room: int) -> Context:
        return self._reader.fit(self.system, turns, room=room, keep_thinking=self.keep_thinking)

    def _fit(self, turn: Turn, *, keeps_all: bool) -> tuple[Context, list[Piece]]:
        """Return the context of the last turn, and notes for the user about left-out text.

        keeps_all: the reserve may be used, if all that the model has read still fits then.
        """
        turns = [turn] if self.amnesia else self.turns
        context = self._context(turns, self._limit - 1) if keeps_all else None
        if context is None or context.first or context.cut != turn.cut:
            context = self._context(turns, self._room)
        read, notes = {id(turn) for turn in turns[context.first :]}, list[Piece]()
        dropped = sum(id(old) not in read and not old.dropped for old in self.turns)
        for old in self.turns:
            old.dropped = id(old) not in read
        if dropped and not self.amnesia:
            many = f"{dropped} messages and their answers"
            oldest = "message and its answer" if dropped == 1 else many
            text = f"the context is full: the oldest {oldest} are no longer read"
            notes.append(Piece(text, "note"))
        if context.cut > turn.cut:
            turn.cut, of = context.cut, len(turn.user)
            text = f"the message is too long: its first {turn.cut} of {of} characters are not read"
            notes.append(Piece(text, "note"))
        return context, notes

    def _run(self, turn: Turn, before: list[Turn], *, goes_on: bool = False) -> Reply:
        """Return the pieces of an answer; the conversation changes when the first one is wanted."""
        abort_event = Flag()
        self._running = self._pieces(turn, [*before, turn], abort_event, goes_on=goes_on)
        return Reply(self._running, abort_event)

    def _pieces(
        self, turn: Turn, turns: list[Turn], abort_event: Flag, *, goes_on: bool
    ) -> Generated[Piece]:
        with self._or_as_before(turn):
            self.turns = turns
            if not goes_on:
                turn.current.seed = self.seed + self.asked
                self.asked += 1
            self.statistics = ChatStatistics()
            run = Answering(
                self.generator,
                self._reader,
                turn.current,
                self.statistics,
                max_tokens=self.max_answer_tokens,
                abort_event=abort_event,
            )
            end: End | None = None
            while end is None or end == "overflow":
                context, notes = self._fit(turn, keeps_all=goes_on and end is None)
                yield from notes
                request = self._request(context.ids, turn.current)
                end = yield from run.stream(request, opened=context.opened)
            if end == "limit":
                yield Piece(f"the answer stops at {run.count} tokens", "note")

    @contextmanager
    def _or_as_before(self, turn: Turn) -> Iterator[None]:
        """Restore the conversation if an answer is ended, or fails, without a token."""
        turns, asked, count = self.turns, self.asked, len(turn.ids)
        states = [(old, old.dropped, old.cut) for old in turns]
        try:
            yield
        except Exl2FlowError:
            raise
        except Exception as error:
            raise InferenceError(f"the answer failed: {error}") from error
        finally:
            if len(turn.ids) == count and not turn.current.ended:
                self.turns, self.asked = turns, asked
                for old, dropped, cut in states:
                    old.dropped, old.cut = dropped, cut

    def _request(self, ids: Sequence[int], answer: Answer) -> Request:
        """Return the request that continues a context.

        Raises:
            ConfigError: a value is out of range.
        """
        for name in ("max_answer_tokens", "reserve"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"`{name}` is {value!r}; it must be an integer from 1")
        for ban in self.bans:
            _checked(ban)
        return Request(
            ids,
            settings=self.settings,
            seed=answer.seed,
            drawn=answer.drawn,
            stops=self._reader.stops,
            banned_strings=self.bans,
            adapters=self.adapters,
            filters=[Resumed(f, tuple(answer.ids)) for f in self.filters]
            if answer.ids
            else self.filters,
            decode_special=self._reader.hides_marks,
        )

    def save(self, path: Path | str) -> None:
        """Write the conversation to a JSON file, whole or not at all.

        Raises:
            WriteFailed: the disk is full or permissions forbid it.
        """
        source = self.generator.model.spec.source_dir.resolve()
        conversation = Conversation(
            model=source.name,
            fingerprint=self._fingerprint,
            format=self.format,
            system=self._system,
            asked=self.asked,
            left_out=tuple(name for name in ("adapters", "filters") if getattr(self, name)),
            messages=tuple(messages_of(self.system, self.turns)),
            **{name: getattr(self, name) for name in STORED},
        )
        conversation.write(Path(path))

    @classmethod
    def load(
        cls, path: Path | str, generator: Generator, fmt: PromptFormat | None = None, **options: Any
    ) -> Self:
        """Load a saved conversation; with the same model it continues with the same ids.

        Args:
            path: the file.
            generator: what answers from now on.
            fmt: the format; None: that of the file, or for another model the one that fits it.
            options: of `Session`, instead of the file's values.

        Raises:
            ConfigError: the file is damaged, or no conversation.
        """
        stored, model = Conversation.read(Path(path)), generator.model
        fingerprint, notes = _fingerprint_of(generator), list[str]()
        if stored.fingerprint != fingerprint:
            fmt = fmt or choose_format(model.spec.source_dir, model.tokenizer)[0]
            stored.forget_ids(model.tokenizer.encode)
            notes.append(
                f"`{path}` is of another model, `{stored.model}`: its answers are read as text, in "
                f"format `{fmt.name}`"
            )
        if not stored.has_ids_below(model.spec.vocab_size):
            raise ConfigError(f"`{path}` has answers with ids that the model does not have")
        for answer in stored.answers:
            # bans cut at most all ids before each
            max_drawn = min(len(answer.ids) * model.spec.vocab_size, MOST_DRAWN)
            if not 0 <= answer.drawn <= max_drawn:
                raise ConfigError(
                    f"`{path}` has an answer whose `drawn` is {answer.drawn}, but its "
                    f"{len(answer.ids)} ids used at most {max_drawn} draws; correct it, or give a "
                    "file that was saved as a conversation"
                )
        values = {name: getattr(stored, name) for name in ("system", *STORED)}
        session = cls(generator, fmt or stored.format, **{**values, **options})
        session._fingerprint, session.asked, session.turns = fingerprint, stored.asked, stored.turns
        lost = [name for name in stored.left_out if not options.get(name)]
        session.notes = [*notes, *(f"`{path}` holds no {name}: give them again" for name in lost)]
        return session

    @cached_property
    def _fingerprint(self) -> str:
        return _fingerprint_of(self.generator)


def _fingerprint_of(generator: Generator) -> str:
    """Return a digest of the model's tokenizer and of the beginning of its embedding."""
    model = generator.model
    sha = hashlib.sha256(model.tokenizer.backend.to_str().encode())
    rows = model.decoder.embedding.weight[:ROWS].detach().half().cpu().contiguous()
    sha.update(repr((tuple(rows.shape), model.spec.num_layers, model.spec.vocab_size)).encode())
    sha.update(rows.numpy().tobytes())
    return sha.hexdigest()


def _checked(text: str) -> str:
    """Return a text that can be encoded.

    Raises:
        ConfigError: it is not text, or holds half of a surrogate pair, as broken UTF-8 becomes.
    """
    if not isinstance(text, str):
        refuse_images(text, "the message")
        raise ConfigError(f"{text!r:.40} is not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text is broken UTF-8 at character {error.start}; send it again without that"
        ) from error
    return text
