"""What a caller wants generated; what no model could do is refused at once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import index

from exl2flow.core.errors import ConfigError
from exl2flow.core.sampling import SamplingSettings

Text = str | Sequence[int]
MOST_TOKENS = 2**31  # of a request
MOST_SHOWN = 60  # characters of a refused value


@dataclass(slots=True, kw_only=True)
class Sampled:
    """What a hook sees before stops are looked at; it may replace `sampled_token`."""

    sampled_token: int
    sampled_prob: float
    candidate_tokens: Sequence[int]
    candidate_probs: Sequence[float]
    logits: object


Hook = Callable[[Sampled], object]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it.

    prompt: text, token ids, or a tuple of two such prompts for classifier-free guidance: the text
        continues the first one. A tuple of two integers is a prompt of two ids.
    max_new_tokens: exact unless something else ends the text; None: as many as fit.
    min_new_tokens: no stop token ends the text before; stop strings do.
    seed: of the draws; None draws differently every time.
    stops: token ids and exact strings that end the text and are not shown; None: the model's EOS
        ids, which a sequence replaces.
    banned_strings: never shown, in upper or lower case; the text is cut back and goes on
        differently.
    heal: choose the last token of the prompt again, among those that begin with its text.
    add_bos: begin a prompt that is text with the model's BOS token, if it has one.
    encode_special: read special tokens spelled in the prompt as such.
    decode_special: spell out special tokens in the text.
    probabilities, top_tokens, logits: what events carry for each token: its probability, so many
        of the likeliest ids with theirs, the model's logits before penalties.
    hooks: called in order for every sampled token; each may replace it.
    end_loops: end a text that repeats itself without end; `loops.py` says what counts.
    max_skips: how often other requests may overtake this one in the queue; None: without limit.
    tag: comes back in every event.

    Raises:
        ConfigError: a value that no model can use, by name.
    """

    prompt: Text | tuple[Text, Text]
    _: KW_ONLY
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    seed: int | None = None
    stops: Sequence[int | str] | None = None
    banned_strings: Sequence[str] = ()
    heal: bool = False
    add_bos: bool = True
    encode_special: bool = False
    decode_special: bool = False
    probabilities: bool = False
    top_tokens: int = 0
    logits: bool = False
    hooks: Sequence[Hook] = ()
    end_loops: bool = False
    max_skips: int | None = 4
    tag: object = None

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:  # lists that the caller may still change
            object.__setattr__(self, name, value)

        keep("prompt", _frozen(self.prompt))
        if self.stops is not None:
            keep("stops", tuple(_stop(stop) for stop in _several("stops", self.stops)))
        keep("banned_strings", tuple(_several("banned_strings", self.banned_strings)))
        keep("hooks", tuple(_several("hooks", self.hooks)))
        for ban in self.banned_strings:
            if not isinstance(ban, str) or not ban:
                raise ConfigError(f"`banned_strings` contains {ban!r}; it takes non-empty strings")
        for hook in self.hooks:
            if not callable(hook):
                raise ConfigError(f"`hooks` contains {hook!r}, which cannot be called")
        self._check_numbers()
        self._check_guidance()

    @property
    def prompts(self) -> tuple[Text, ...]:
        """The prompt, or the two of a pair."""
        return self.prompt if _is_pair(self.prompt) else (self.prompt,)  # type: ignore[return-value]

    def _check_numbers(self) -> None:
        least = {"max_new_tokens": 1, "min_new_tokens": 0, "top_tokens": 0, "max_skips": 0}
        optional = ("max_new_tokens", "max_skips", "seed")
        for name in (*least, "seed"):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"`{name}` is {value!r}; it must be an integer")
            if name in least and value < least[name]:
                raise ConfigError(f"`{name}` is {value}; it must be {least[name]} or more")
            if name in least and value >= MOST_TOKENS:
                raise ConfigError(f"`{name}` is {value}; it must be less than {MOST_TOKENS}")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"`min_new_tokens` is {self.min_new_tokens}, `max_new_tokens` only "
                f"{self.max_new_tokens}; request at least as many"
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


def _is_pair(prompt: object) -> bool:
    is_two = isinstance(prompt, tuple) and len(prompt) == 2
    return is_two and all(isinstance(part, Sequence) for part in prompt)  # type: ignore[attr-defined]


def _frozen(prompt: object) -> object:
    if _is_pair(prompt):
        return tuple(_frozen_text(part) for part in prompt)  # type: ignore[attr-defined]
    return _frozen_text(prompt)


def _frozen_text(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    try:
        return tuple(map(index, prompt))  # type: ignore[call-overload]
    except TypeError as error:
        raise ConfigError(
            f"`prompt` is {_shown(prompt)}; it must be text, token ids, or a tuple of two prompts"
        ) from error


def _several(name: str, values: object) -> tuple[object, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"`{name}` is {_shown(values)}; it must be a sequence, such as a tuple")
    return tuple(values)


def _stop(stop: object) -> int | str:
    if isinstance(stop, bool) or not isinstance(stop, int | str) or stop == "":
        raise ConfigError(f"`stops` contains {_shown(stop)}; it takes ids and non-empty strings")
    return stop


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
