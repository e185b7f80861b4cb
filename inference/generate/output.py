"""From sampled tokens to text that may be shown: stops, bans, whole characters, healing.

Text is held back while it may still become a stop string or a banned one. Both are looked for
before the count of tokens, so that neither shows because a text ends. A banned string cuts the
text back to the token in which it begins, and bans that token there. Case is compared by
`casefold`, which unlike `lower` does not depend on the letters around.
"""

from dataclasses import dataclass
from itertools import accumulate

from exl2flow.core.errors import InferenceError
from exl2flow.inference.generate.event import Event, Held, Reason, Token, columns
from exl2flow.inference.generate.loops import is_loop
from exl2flow.inference.generate.prompt import Prompt
from exl2flow.inference.generate.request import Request
from exl2flow.inference.generate.strings import Strings
from exl2flow.model import TextStream, Tokenizer
from exl2flow.model.text_stream import Place

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a token leads to: an event, if there is one, and tokens to cut back, it included."""

    event: Event | None = None
    rewind: int = 0


NOTHING = Outcome()


@dataclass(slots=True)
class _Pending:
    """A token that is not shown yet, the text that it completes, and the stream before it."""

    token: Token
    text: str
    place: Place
    unhealed: int


class Output:
    """The generated part of one text; tokens go in one at a time, in the order of the text.

    ids: accepted tokens, the healed one included, the stop token not.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, prompt: Prompt, *, max_new_tokens: int
    ) -> None:
        """Begin behind a prompt.

        Args:
            request: what to generate.
            tokenizer: the model's.
            prompt: the ids of the request's prompt.
            max_new_tokens: the request's, or as many as fit.
        """
        self.ids: list[int] = []
        self.reason: Reason | None = None
        self._request, self._healed, self._most = request, prompt.healed, max_new_tokens
        stops = tokenizer.eos_token_ids if request.stops is None else request.stops
        self._stop_ids = frozenset(stop for stop in stops if isinstance(stop, int))
        self._stops = Strings([stop for stop in stops if isinstance(stop, str)])
        self._bans = Strings([ban.casefold() for ban in request.banned_strings])
        self._banned: dict[int, frozenset[int]] = {}  # by position, of pending tokens only
        self._pending: list[_Pending] = []
        self._shown: list[str] = []
        self._stream = TextStream(tokenizer, prompt.sequences[0], special=request.decode_special)
        self._healing: tuple[int, ...] | None = None
        self._unhealed = 0  # characters to come that the prompt has already
        if prompt.healed is not None:
            self._healing = tokenizer.healing(prompt.healed)
            place = self._stream.place
            self._unhealed = len(self._stream.push(prompt.healed))
            self._stream.rewind(place)

    @property
    def new_tokens(self) -> int:
        """Tokens generated, a stop token included, the healed one not; before that one, -1."""
        return len(self.ids) - (self._healed is not None) + (self.reason == "stop_token")

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._shown)

    @property
    def healing(self) -> tuple[int, ...] | None:
        """The only ids that the next sample may take; None: all."""
        return None if self.ids else self._healing

    @property
    def waits(self) -> bool:
        """Whether a sample depends on what becomes of the one before it."""
        return bool(self._bans or self._request.hooks)

    def blocked(self, ahead: int = 0) -> frozenset[int]:
        """Return the ids that a sample must not take, `ahead` samples after the next one."""
        banned = self._banned.get(len(self.ids) + ahead, NONE) if self._banned else NONE
        if max(self.new_tokens + ahead, 0) >= self._request.min_new_tokens:
            return banned
        healed = {self._healed} if self.healing and not ahead else NONE
        return banned | (self._stop_ids - healed)

    def push(self, token: Token) -> Outcome:
        """Take the next token, which hooks have already seen."""
        if self._banned and token.id in self._banned.get(len(self.ids), NONE):
            return Outcome(self.finish("error", error=self._exhausted()))
        is_prompt = token.id == self._healed and self.healing is not None
        if token.id in self._stop_ids and not is_prompt:
            return Outcome(self._end("stop_token", trigger=token.id, stop=token))
        place, unhealed = self._stream.place, self._unhealed
        text = self._beyond_prompt(self._stream.push(token.id))
        self.ids.append(token.id)
        self._pending.append(_Pending(token, text, place, unhealed))
        found = self._find() if text and (self._stops or self._bans) else None
        if found is not None:
            return found
        if self.new_tokens >= self._most:
            return Outcome(self._end("max_new_tokens"))
        if self._request.end_loops and is_loop(self.ids):
            return Outcome(self._end("loop"))
        count = self._ready()
        return Outcome(self._show(count)) if count else NOTHING

    def finish(self, reason: Reason, *, error: Exception | None = None) -> Event:
        """End the text from outside and return its last event, with all text that was pending."""
        return self._end(reason, error=error)

    def _beyond_prompt(self, text: str) -> str:
        """Cut off what belongs to the healed token and stands in the prompt already."""
        cut = min(self._unhealed, len(text))
        self._unhealed -= cut
        return text[cut:]

    def _find(self) -> Outcome | None:
        """Look for whole strings: a ban counts if it ends before a stop string begins."""
        text = self._pending_text()
        stop = self._stops.find(text)
        ban = self._bans.find((text if stop is None else text[: stop[0]]).casefold())
        if ban is not None:
            return self._rewind(_tokens_before(ban[0], self._pending, fold=True))
        if stop is not None:
            return Outcome(self._end("stop_string", trigger=stop[1], cut=stop[0]))
        return None

    def _ready(self) -> int:
        """Return how many pending tokens can be shown, whatever comes next."""
        ready = len(self._pending)
        if self._stream.is_holding:
            shown = self._stream.place.shown
            ready = sum(pending.place.tokens < shown for pending in self._pending)
        if self._stops and ready:
            start = self._stops.unfinished(self._pending_text())
            ready = min(ready, _tokens_before(start, self._pending))
        if self._bans and ready:
            start = self._bans.unfinished(self._pending_text().casefold())
            ready = min(ready, _tokens_before(start, self._pending, fold=True))
        return ready

    def _show(self, count: int) -> Event:
        shown, self._pending = self._pending[:count], self._pending[count:]
        if self._banned:
            first = len(self.ids) - len(self._pending)
            self._banned = {at: ids for at, ids in self._banned.items() if at >= first}
        text = "".join([pending.text for pending in shown])
        self._shown.append(text)
        fields = columns(self._request, [pending.token for pending in shown])
        return Event(stage="text", tag=self._request.tag, text=text, **fields)

    def _rewind(self, first: int) -> Outcome:
        """Cut off the pending tokens from `first` on, and ban that one where it stood."""
        kept, cut = self._pending[:first], self._pending[first:]
        at = len(self.ids) - len(cut)
        suppressed = self._pending_text()[sum(len(pending.text) for pending in kept) :]
        event = Event(
            stage="text",
            tag=self._request.tag,
            suppressed_text=suppressed,
            suppressed_ids=tuple(self.ids[at:]),
        )
        banned = self._banned.get(at, NONE) | {cut[0].token.id}
        self._banned = {other: ids for other, ids in self._banned.items() if other < at}
        self._banned[at] = banned
        self._stream.rewind(cut[0].place)
        self._unhealed = cut[0].unhealed
        self._pending = kept
        del self.ids[at:]
        return Outcome(event, rewind=len(cut))

    def _end(
        self,
        reason: Reason,
        *,
        trigger: int | str | None = None,
        cut: int | None = None,
        stop: Token | None = None,
        error: Exception | None = None,
    ) -> Event:
        """Show what is pending up to character `cut`; without one, up to a string to hide."""
        self.reason = reason
        if self._pending:
            self._pending[-1].text += self._beyond_prompt(self._stream.flush())
        text = self._pending_text()
        cut = self._safe_length(text) if cut is None else cut
        whole = _tokens_before(cut, self._pending)
        tokens = [pending.token for pending in self._pending]
        held = tokens[whole:] if cut < len(text) else []
        self._shown.append(text[:cut])
        self._pending = []
        return Event(
            stage="text",
            tag=self._request.tag,
            text=text[:cut],
            reason=reason,
            trigger=trigger,
            held=self._held(text[cut:], held, stop),
            error=error,
            **columns(self._request, tokens),
        )

    def _safe_length(self, text: str) -> int:
        """Return how much of a text has no string to hide, which half a character may cover."""
        stop = self._stops.find(text)
        ban = self._bans.find(text.casefold())
        length = len(text) if stop is None else stop[0]
        if ban is not None:
            before = self._pending[: _tokens_before(ban[0], self._pending, fold=True)]
            length = min(length, sum(len(pending.text) for pending in before))
        return length

    def _held(self, text: str, tokens: list[Token], stop: Token | None) -> Held:
        if stop is not None:
            tokens = [*tokens, stop]
            text += self._stream.push(stop.id) + self._stream.flush()
        return Held(text=text, **columns(self._request, tokens))

    def _pending_text(self) -> str:
        return "".join([pending.text for pending in self._pending])

    def _exhausted(self) -> InferenceError:
        bans = ", ".join(map(repr, self._request.banned_strings))
        return InferenceError(
            f"no token is left after {self.new_tokens} new ones: each would complete a banned "
            f"string ({bans}), or a hook insists on one; ban less"
        )


def _tokens_before(end: int, pending: list[_Pending], *, fold: bool = False) -> int:
    """Return how many tokens have all their text before a character of the (folded) text."""
    texts = (item.text.casefold() if fold else item.text for item in pending)
    return sum(stop <= end for stop in accumulate(map(len, texts)))
