"""Turns sampled tokens into visible text: stops, bans, whole characters, token healing.

Text is held back while it could become a stop string or a banned string. Both are checked before
the token limit, so neither shows up because a text ends. A banned string cuts the text back to the
token in which it begins, and blocks that token at that position. Bans ignore case by `casefold`:
unlike `lower`, it does not depend on neighbouring letters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from exl2flow.core.errors import TextStuck
from exl2flow.core.requests.request import Request
from exl2flow.engine.generate.bans import firsts
from exl2flow.engine.generate.event import Event, Reason, TextPiece, Token, columns
from exl2flow.engine.generate.loops import is_loop
from exl2flow.engine.generate.prompt import Prompt
from exl2flow.engine.generate.strings import Strings
from exl2flow.model import TextStream, Tokenizer
from exl2flow.model.text.text_stream import StreamPosition

NONE: frozenset[int] = frozenset()


@dataclass(slots=True)
class Pending:
    """A token whose text cannot be shown yet: the text it completes, and the state before it.

    place: of the text stream; unhealed: characters still to drop.
    """

    token: Token
    text: str
    place: StreamPosition
    unhealed: int


class Output:
    """The generated part of one text; takes one token at a time.

    ids: accepted tokens, with the healed one, without the stop token; excluded: see `Request`.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, prompt: Prompt, *, max_new_tokens: int
    ) -> None:
        """Start after the request's encoded prompt; `max_new_tokens` may be less than requested."""
        self.ids: list[int] = []
        self.reason: Reason | None = None
        self._healed, self.max_new_tokens = prompt.healed, max_new_tokens
        self._eos_ids = tokenizer.eos_token_ids
        self.follow(request)
        self._bans = Strings([ban.casefold() for ban in request.banned_strings])
        self._cut: list[tuple[int, tuple[int, ...]]] = []  # where bans cut what, of pending places
        self._pending: list[Pending] = []
        self._tail = ""  # of the shown text, where bans can cut what follows
        self._stream = TextStream(tokenizer, prompt.sequences[0], special=request.decode_special)
        self._healing: tuple[int, ...] | None = None
        self._unhealed = 0  # characters still to drop: the prompt already has them
        if prompt.healed is not None:
            self._healing = tokenizer.healing(prompt.healed)
            place = self._stream.place
            self._unhealed = len(self._stream.push(prompt.healed))
            self._stream.rewind(place)

    def follow(self, request: Request) -> None:
        """Apply the stops, hooks and exclusions of a request to the tokens that follow."""
        self._request, self.excluded = request, frozenset(request.excluded)
        stops = self._eos_ids if request.stops is None else request.stops
        self._stop_ids = frozenset(stop for stop in stops if isinstance(stop, int))
        self._stops = Strings([stop for stop in stops if isinstance(stop, str)])

    @property
    def new_tokens(self) -> int:
        """Generated tokens: counts the stop token but not the healed one; -1 before the latter."""
        return len(self.ids) - (self._healed is not None) + (self.reason == "stop_token")

    @property
    def healing(self) -> tuple[int, ...] | None:
        """The only ids that the next sample may take, ascending; None: all."""
        return None if self.ids else self._healing

    @property
    def waits(self) -> bool:
        """Whether the next sample may start only after this token has been pushed."""
        return bool(self._bans or self._request.hooks)

    @property
    def may_rewind(self) -> bool:
        """Whether text is held back that a banned string may cut."""
        return bool(self._bans and self._pending)

    def ends_with(self, ids: Sequence[int]) -> bool:
        """Return whether one of the next ids ends the text."""
        return not self._stop_ids.isdisjoint(ids)

    @property
    def has_cut(self) -> bool:
        """Whether what may follow depends on what was cut."""
        return bool(self._cut)

    def cut(self, drafted: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Return the rest of every banned passage whose beginning was generated again."""
        repeated = [(ids, (*self.ids[at:], *drafted)) for at, ids in self._cut]
        return [ids[len(begin) :] for ids, begin in repeated if ids[: len(begin)] == begin != ids]

    def blocked(self, offset: int = 0, drafted: Sequence[int] = ()) -> frozenset[int]:
        """Return the ids to mask `offset` positions from now, after these draft tokens if known."""
        banned = self.excluded
        if self._cut and offset == len(drafted):
            banned |= firsts(self.cut(drafted))
        if max(self.new_tokens + offset, 0) >= self._request.min_new_tokens:
            return banned
        healed = {self._healed} if self.healing and not offset else NONE
        return banned | (self._stop_ids - healed)

    def push(self, token: Token) -> Event | None:
        """Take the next token, after hooks have seen it; it and others before it may be cut."""
        if self._cut and (token.id,) in self.cut():
            bans = ", ".join(f"{ban!r:.40}" for ban in self._request.banned_strings[:5])
            error = TextStuck(
                f"no token is left that does not complete a banned string ({bans}), or a hook "
                "insists on one that does; ban less"
            )
            return self.finish("error", error=error)
        is_prompt = token.id == self._healed and self.healing is not None
        if token.id in self._stop_ids and not is_prompt:
            return self.finish("stop_token", trigger=token.id, stop=token)
        place, unhealed = self._stream.place, self._unhealed
        text = self._beyond_prompt(self._stream.push(token.id))
        self.ids.append(token.id)
        self._pending.append(Pending(token, text, place, unhealed))
        event = self._act_on_strings() if text and (self._stops or self._bans) else None
        if event is not None:
            return event
        if self.new_tokens >= self.max_new_tokens:
            return self.finish("max_new_tokens")
        if self._request.end_loops and is_loop(self.ids):
            return self.finish("loop")
        count = self._ready()
        return self._show(count) if count else None

    def _beyond_prompt(self, text: str) -> str:
        """Drop the part of the healed token's text that the prompt already has."""
        cut = min(self._unhealed, len(text))
        self._unhealed -= cut
        return text[cut:]

    def _act_on_strings(self) -> Event | None:
        """End the text at a complete stop string, or cut a complete banned string."""
        stop, banned = self._search()
        if banned is not None:
            return self._rewind(banned)
        if stop is not None:
            return self.finish("stop_string", trigger=stop[1], cut=stop[0])
        return None

    def _search(self) -> tuple[tuple[int, str] | None, int | None]:
        """Return the earliest stop string with its place, and the token that begins a ban.

        A ban counts if it ends before that stop string. Strings can begin in what is shown: a cut
        may have removed what made its end harmless.
        """
        text = self._tail + joined(self._pending)
        stop = self._stops.find(text)
        ban = self._bans.find((text if stop is None else text[: stop[0]]).casefold())
        if stop is not None:
            stop = max(stop[0] - len(self._tail), 0), stop[1]
        if ban is None:
            return stop, None
        start = ban[0] - len(self._tail.casefold())
        return stop, tokens_before(start, self._pending, fold=True)

    def _ready(self) -> int:
        """Return how many pending tokens can be shown whatever comes next."""
        ready, place = len(self._pending), self._stream.place
        if place.is_holding:
            ready = sum(pending.place.tokens < place.shown for pending in self._pending)
        if self._stops and ready:
            start = self._stops.unfinished(joined(self._pending))
            ready = min(ready, tokens_before(start, self._pending))
        if self._bans and ready:
            start = self._bans.unfinished(joined(self._pending).casefold())
            ready = min(ready, tokens_before(start, self._pending, fold=True))
        while 0 < ready < len(self._pending) and self._pending[ready].place.is_holding:
            ready -= 1  # its text comes with the next token
        return ready

    def _show(self, count: int) -> Event:
        shown, self._pending = self._pending[:count], self._pending[count:]
        if self._cut:
            first = len(self.ids) - len(self._pending)
            self._cut = [(at, ids) for at, ids in self._cut if at >= first]
        text = joined(shown)
        if self._bans:
            self._tail = (self._tail + text)[-max(self._stops.longest, self._bans.longest) :]
        fields = columns(self._request, [pending.token for pending in shown])
        return Event(stage="text", tag=self._request.tag, text=text, **fields)

    def _rewind(self, first: int) -> Event:
        """Cut the pending tokens from `first` on, which are not to begin like that again."""
        while self._pending[first].place.is_holding:
            first -= 1  # its text came with later tokens
        cut = self._pending[first:]
        at = len(self.ids) - len(cut)
        removed, tag = tuple(self.ids[at:]), self._request.tag
        event = Event(stage="text", tag=tag, suppressed_text=joined(cut), suppressed_ids=removed)
        self._cut = [(place, ids) for place, ids in self._cut if place <= at]
        self._cut.append((at, removed))
        self._stream.rewind(cut[0].place)
        self._unhealed = cut[0].unhealed
        del self._pending[first:], self.ids[at:]
        return event

    def finish(
        self,
        reason: Reason,
        *,
        trigger: int | str | None = None,
        cut: int | None = None,
        stop: Token | None = None,
        error: Exception | None = None,
    ) -> Event:
        """End the text and return its last event, which shows all that is pending.

        cut: number of characters to show; None: up to the first string to hide. stop: the token
        that ended the text.
        """
        self.reason = reason
        if self._pending:
            self._pending[-1].text += self._beyond_prompt(self._stream.flush())
        text = joined(self._pending)
        if cut is None:  # an incomplete character could conceal a string
            concealed, banned = self._search()
            cut = len(joined(self._pending[:banned]))
            cut = cut if concealed is None else min(cut, concealed[0])
        tokens = [pending.token for pending in self._pending]
        held = tokens[tokens_before(cut, self._pending) :] if cut < len(text) else []
        held_text = text[cut:]
        if stop is not None:
            held.append(stop)
            held_text += self._stream.push(stop.id) + self._stream.flush()
        self._pending = []
        return Event(
            stage="text",
            tag=self._request.tag,
            text=text[:cut],
            reason=reason,
            trigger=trigger,
            held=TextPiece(text=held_text, **columns(self._request, held)),
            error=error,
            **columns(self._request, tokens),
        )


def joined(tokens: Sequence[Pending]) -> str:
    """Return the text of several tokens."""
    return "".join([pending.text for pending in tokens])


def tokens_before(end: int, tokens: Sequence[Pending], *, fold: bool = False) -> int:
    """Return how many tokens end at or before a character of their joined (folded) text."""
    texts = (pending.text.casefold() if fold else pending.text for pending in tokens)
    return sum(stop <= end for stop in accumulate(map(len, texts)))
