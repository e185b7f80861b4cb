"""`Request`: what to generate; refuses values that no model could use."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from operator import index
from typing import Any, Protocol, TypeGuard, cast

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.core.requests.images import refuse_images

Text = str | Sequence[int]
EMBEDDING = "{{EMBED_HERE}}"  # stands for the next tensor in a prompt given as text
FIRST_EMBEDDING = 1_000_000_000  # id of the first row of all tensors in a prompt given as ids
MOST_TOKENS = 2**31  # of a request
MOST_RANKED = 20  # likeliest tokens of the model itself
NO_PROMPTS = (bytes, bytearray, Mapping, Set)  # they have elements, but are neither text nor ids
WHAT_PROMPTS_ARE = "give a text, or a list of texts, of lists of ids, or of tuples of two prompts"
FOR_MESSAGES = "for messages use `Session` of `exl2flow.engine.chat`"
MOST_SHOWN = 60  # characters of a refused value
# Sequences of a `Request`: whether an element is right, and why it is refused
ELEMENTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "stops": (
        lambda stop: type(stop) is not bool and isinstance(stop, int | str) and stop != "",
        "; it takes ids and non-empty strings",
    ),
    "banned_strings": (lambda ban: isinstance(ban, str) and ban, "; it takes non-empty strings"),
    "hooks": (callable, ", which cannot be called"),
    "filters": (lambda one: callable(getattr(one, "start", None)), ", which is not a filter"),
    "embeddings": (lambda one: hasattr(one, "is_floating_point"), ", which is not a tensor"),
}


@dataclass(slots=True, kw_only=True)
class Sampled:
    """A sampled token as a hook sees it, before stops are checked; it may replace `sampled_token`.

    candidate_tokens: at least 64 ids, if the settings leave as many, likeliest first.
    logits: the model's row, before penalties.
    feed_filters: a hook may set it to false to hide the token from the request's filters.
    """

    sampled_token: int
    sampled_prob: float
    candidate_tokens: Sequence[int]
    candidate_probs: Sequence[float]
    logits: object
    feed_filters: bool = True


Hook = Callable[[Sampled], object]


class Filter(Protocol):
    """A constraint on texts, shared by any number of requests; see `engine/filters/`."""

    def start(self, tokenizer: Any, width: int, prefix: str = "") -> Any:
        """Return the `Constraint` of an empty text; may run in several threads at once.

        Args:
            tokenizer: the model's `Tokenizer`.
            width: of the logits.
            prefix: what a healed first token begins with.
        """
        ...


class AdapterLike(Protocol):
    """An adapter of a model (`engine/adapters/`); adapters of equal `digest` are the same."""

    @property
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it.

    prompt: text, token ids, or for classifier-free guidance a tuple of two of these, of which the
        generated text continues the first. A tuple of two integers is a prompt of two ids.
    max_new_tokens: generate exactly this many unless the text ends earlier; None: all that fit; 0
        with `scores` only.
    min_new_tokens: ignore stop tokens until then; stop strings still end the text.
    seed: seed for sampling; None: a new one every time.
    drawn: draws of the seed to pass over, because a text that this one continues has used them.
    stops: token ids and case-sensitive strings that end the text and are not shown; None: the
        model's EOS ids. A sequence replaces these, so list them if they should count.
    excluded: token ids that are never sampled, any number of them.
    banned_strings: never shown, regardless of case; the text is cut back and continued differently.
    heal: sample the prompt's last token again among those that begin with its text.
    add_bos: begin a prompt given as text as the tokenizer does: with BOS, or with nothing.
    encode_special: treat special tokens spelled in the prompt as special tokens.
    decode_special: spell out special tokens in the text.
    probabilities: report each token's probability.
    top_tokens: report this many of the likeliest ids per token, with their probabilities.
    raw: report probabilities and top tokens (at most 20) of the model itself, before any sampler
        step, penalty, bias or filter; of a pair, after the first prompt.
    scores: report the log probability of each prompt token, and this many of the likeliest ids in
        its place (at most 20); None: do not. The prompt, the first one of a pair, is then read
        without cached pages.
    logits: report the model's logits per token, before penalties.
    hooks: called in order for every sampled token; each may replace it.
    filters: what the text must match, all of them.
    adapters: what changes the model for this text; several add up.
    salt: texts with different salts share no pages, so none can find out what another one said.
    prefer_end: end the text as soon as the filters allow it.
    embeddings: floating-point tensors (n, hidden size), read instead of tokens. In text, each
        `EMBEDDING` stands for the next tensor; blanks around it are dropped. Among ids,
        `FIRST_EMBEDDING + i` is row i of all tensors joined. A prompt must not end in one. In a
        pair, one of the prompts may have none.
    end_loops: end a text that repeats itself without end; see `engine/generate/loops.py`.
    max_skips: how many other requests may overtake this one in the queue; None: any number.
    tag: returned in every event.

    Raises:
        ConfigError: no model can use a value; the message names it.
    """

    prompt: Text | tuple[Text, Text]
    _: KW_ONLY
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    seed: int | None = None
    drawn: int = 0
    stops: Sequence[int | str] | None = None
    excluded: Collection[int] = ()
    banned_strings: Sequence[str] = ()
    heal: bool = False
    add_bos: bool = True
    encode_special: bool = False
    decode_special: bool = False
    probabilities: bool = False
    top_tokens: int = 0
    raw: bool = False
    scores: int | None = None
    logits: bool = False
    hooks: Sequence[Hook] = ()
    filters: Sequence[Filter] = ()
    adapters: Sequence[AdapterLike] = ()
    salt: bytes = b""
    prefer_end: bool = False
    embeddings: Sequence[Any] = field(default=(), compare=False)  # tensors have no truth value
    end_loops: bool = False
    max_skips: int | None = 4
    tag: object = None

    def __post_init__(self) -> None:
        copies: dict[str, object] = {  # because callers may change their lists
            "prompt": _frozen(self.prompt),
            "excluded": frozenset(_ids("excluded", self.excluded)),
            "adapters": _several("adapters", self.adapters),
        }
        for name, (is_right, why) in ELEMENTS.items():
            if name == "stops" and self.stops is None:
                continue
            copies[name] = values = _several(name, getattr(self, name))
            for value in values:
                if not is_right(value):
                    raise ConfigError(f"`{name}` contains {_shown(value)}{why}")
        for name, value in copies.items():
            object.__setattr__(self, name, value)
        digests = [getattr(adapter, "digest", None) for adapter in self.adapters]
        if None in digests or len({*digests}) < len(digests):
            raise ConfigError(
                f"`adapters` is {_shown(self.adapters)}; it takes adapters, each of them once"
            )
        self._check_numbers()
        self._check_ranked()
        self._check_guidance()
        if self.embeddings:
            self._check_embeddings()

    @property
    def prompts(self) -> tuple[Text, ...]:
        """The prompt, or the two of a pair."""
        prompts = self.prompt if _is_pair(self.prompt) else (self.prompt,)
        return cast(tuple[Text, ...], prompts)

    def _check_numbers(self) -> None:
        least = {"max_new_tokens": int(self.scores is None)} | dict.fromkeys(
            ("min_new_tokens", "top_tokens", "scores", "max_skips", "drawn"), 0
        )
        optional = ("max_new_tokens", "scores", "max_skips", "seed")
        for name in (*least, "seed"):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            check_integer(name, value)
            if name in least and value < least[name]:
                raise ConfigError(f"`{name}` is {value}; it must be {least[name]} or more")
            if name in least and value >= MOST_TOKENS:
                raise ConfigError(f"`{name}` is {value}; it must be less than {MOST_TOKENS}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"`min_new_tokens` is {self.min_new_tokens}, `max_new_tokens` only "
                f"{self.max_new_tokens}; request at least as many"
            )

    def _check_ranked(self) -> None:
        ranked = {"top_tokens": self.top_tokens if self.raw else 0, "scores": self.scores or 0}
        for name, value in ranked.items():
            if value > MOST_RANKED:
                raw = " with `raw`" if name == "top_tokens" else ""
                raise ConfigError(f"`{name}` is {value}; it must be {MOST_RANKED} or less{raw}")
        if self.scores is not None and self.embeddings:
            raise ConfigError(
                "`scores` is set, but `embeddings` have no probabilities; leave one of them out"
            )
        if self.scores is not None and self.heal:
            raise ConfigError(
                "`scores` is set, but `heal` replaces the prompt's last token; leave one of "
                "them out"
            )

    def _check_guidance(self) -> None:
        if not isinstance(self.settings, SamplingSettings):
            raise ConfigError(f"`settings` is {self.settings!r}; it must be `SamplingSettings`")
        scale = self.settings.cfg_scale
        if scale is None and len(self.prompts) == 2:
            raise ConfigError(
                "`prompt` is a pair, but `cfg_scale` is not set; set it in `settings`"
            )
        if scale is not None and len(self.prompts) == 1:
            raise ConfigError(f"`cfg_scale` is {scale}, which needs a tuple of two prompts")

    def _check_embeddings(self) -> None:
        for one in self.embeddings:
            if one.ndim != 2 or not len(one) or not one.is_floating_point():
                raise ConfigError(
                    f"`embeddings` contains a tensor of shape {tuple(one.shape)} and {one.dtype}; "
                    "it takes rows (n, hidden size) of floating-point numbers"
                )
        tensors, rows = len(self.embeddings), sum(map(len, self.embeddings))
        texts = [part.count(EMBEDDING) for part in self.prompts if isinstance(part, str)]
        ids = [max(part, default=0) for part in self.prompts if not isinstance(part, str)]
        last = max(ids, default=0) - FIRST_EMBEDDING
        if last >= rows:
            raise ConfigError(
                f"id {max(ids)} in the prompt is row {last} of `embeddings`, which has {rows}"
            )
        if {*texts} - {0, tensors} or (last < 0 and not any(texts)):
            raise ConfigError(
                f"`embeddings` has {tensors} tensors; give `prompt` one `{EMBEDDING}` for each, or "
                f"ids from {FIRST_EMBEDDING} on"
            )


def check_integer(name: str, value: object) -> None:
    """Raise `ConfigError` if a value is not an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"`{name}` is {value!r}; it must be an integer")


def listed(prompts: object) -> list[Any]:
    """Return the prompts of a call that takes one text or several prompts.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, NO_PROMPTS) or not isinstance(prompts, Iterable):
        raise ConfigError(f"`prompts` is {_shown(prompts)}; {WHAT_PROMPTS_ARE}{_talk(prompts)}")
    several = [*prompts]
    if several and all(map(_is_id, several)):
        raise ConfigError(f"`prompts` is {_shown(prompts)}; put the ids of a prompt in a list")
    return several


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _talk(prompt: object) -> str:
    """Return how to generate from messages, if a prompt looks like one."""
    return f"; {FOR_MESSAGES}" if isinstance(prompt, Mapping) and "role" in prompt else ""


def _is_pair(prompt: object) -> TypeGuard[tuple[object, object]]:
    if not isinstance(prompt, tuple) or len(prompt) != 2:
        return False
    return all(isinstance(part, Sequence) for part in prompt)


def _frozen(prompt: object) -> object:
    if _is_pair(prompt):
        return tuple(_frozen_text(part) for part in prompt)
    return _frozen_text(prompt)


def _frozen_text(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    refuse_images(prompt, "`prompt`")
    try:
        if isinstance(prompt, NO_PROMPTS):
            raise TypeError
        return tuple(map(index, prompt))  # type: ignore[call-overload]
    except TypeError as error:
        raise ConfigError(
            f"`prompt` is {_shown(prompt)}; it must be text, token ids, or a tuple of two prompts"
            f"{_talk(_first(prompt))}"
        ) from error


def _first(prompt: object) -> object:
    return prompt[0] if isinstance(prompt, list) and prompt else prompt


def _several(name: str, values: object) -> tuple[object, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"`{name}` is {_shown(values)}; it must be a sequence, such as a tuple")
    return tuple(values)


def _ids(name: str, values: object) -> list[int]:
    try:
        return [*map(index, _several(name, values))]  # type: ignore[arg-type]  # they may be anything
    except TypeError as error:
        raise ConfigError(f"`{name}` is {_shown(values)}; it takes token ids") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
