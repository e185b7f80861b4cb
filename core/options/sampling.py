"""Sampling settings: frozen values only; state that depends on history lives with its sequence."""

import math
import sys
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Self

from pydantic import AllowInfNan

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import Option
from exl2flow.core.words import as_typed

GREEDY_BELOW = 0.01  # lower temperatures always take the likeliest token
Step = Literal["cfg", "penalties", "dry", "rest", "sorts", "mirostat"]


@dataclass(frozen=True, slots=True)
class Neutral:
    """Values of a setting that change nothing; others switch a step of the sampler on.

    step: None for one that every sample has. number: stands for the values, None: they do.
    """

    values: tuple[float | None, ...]
    step: Step | None = None
    number: float | None = None


NEVER = Neutral(())


def _value(
    default: Any,
    description: str,
    metavar: str = "",
    *,
    low: float | None = None,
    high: float = math.inf,
    rare: bool = True,
    neutral: Neutral = NEVER,
) -> Any:
    """Return a field with its description, its bounds, its neutral values, and its option."""
    option = Option(metavar, "Sampling", rare=rare)
    metadata = {"description": description, "option": option, "low": low, "high": high}
    return field(default=default, metadata=metadata | {"neutral": neutral})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Settings of the sampler; except for temperature, top-k and top-p, all steps are off.

    token_bias: (id, logit to add) pairs; -infinity excludes an id.
    dry_breakers: ids that no repetition found by DRY may contain; None: the tokenizer's, which are
        punctuation, quotes, brackets, white space that ends a line, and special tokens.
    xtc_ignored: ids that XTC leaves alone; None: the tokenizer's line ends and special tokens.

    Raises:
        ConfigError: a value is out of range, by name.
    """

    temperature: float = _value(
        0.8, "divide logits by T; below 0.01: always the likeliest token", "T", low=0, rare=False
    )
    temperature_last: bool = _value(
        False, "apply the temperature after tokens are dropped", neutral=Neutral((False,), "rest")
    )
    smoothing_factor: float = _value(
        0.0,
        "square the distances to the greatest logit, times F; 0: off",
        "F",
        low=0,
        neutral=Neutral((0,), "rest"),
    )
    min_temp: float = _value(0.0, "dynamic temperature of a certain distribution", "T", low=0)
    max_temp: float = _value(
        0.0, "dynamic temperature of a flat distribution; off unless greater", "T", low=0
    )
    temp_exponent: float = _value(
        1.0, "power of the entropy that moves the dynamic temperature", "X", low=0
    )
    top_k: int = _value(50, "draw from the K likeliest tokens; 0: from all", "K", low=0, rare=False)
    top_p: float = _value(
        0.8,
        "draw from the fewest tokens whose probabilities sum to P; 0 or 1: off",
        "P",
        low=0,
        high=1,
        rare=False,
        neutral=Neutral((0, 1), number=math.inf),
    )
    top_a: float = _value(
        0.0,
        "drop tokens below A times the squared greatest probability",
        "A",
        low=0,
        neutral=Neutral((0,), "rest"),
    )
    min_p: float = _value(
        0.0,
        "drop tokens less likely than P times the likeliest; 0: off",
        "P",
        low=0,
        high=1,
        rare=False,
        neutral=Neutral((0,)),
    )
    tfs: float = _value(
        0.0,
        "drop the tail where the curve of probabilities flattens; 0 or 1: off",
        "Z",
        low=0,
        high=1,
        neutral=Neutral((0, 1), "rest", math.inf),
    )
    typical: float = _value(
        0.0,
        "keep tokens near the mean surprise that sum to P; 0 or 1: off",
        "P",
        low=0,
        high=1,
        neutral=Neutral((0, 1), "sorts", math.inf),
    )
    skew: float = _value(
        0.0,
        "favour less likely tokens if positive, likelier if negative",
        "S",
        neutral=Neutral((0,), "rest"),
    )
    repetition_penalty: float = _value(
        1.0,
        "divide positive and multiply negative logits of seen tokens by R",
        "R",
        low=0,
        rare=False,
        neutral=Neutral((1,), "penalties"),
    )
    repetition_range: int = _value(-1, "tokens back that the penalties reach; -1: all", "N", low=-1)
    repetition_decay: int = _value(
        0, "further tokens back over which the penalties fade", "N", low=0
    )
    frequency_penalty: float = _value(
        0.0,
        "subtract F from a token's logit for each time it was seen",
        "F",
        neutral=Neutral((0,), "penalties"),
    )
    presence_penalty: float = _value(
        0.0,
        "subtract F from the logit of a token that was seen",
        "F",
        neutral=Neutral((0,), "penalties"),
    )
    mirostat: bool = _value(
        False, "keep the surprise near a target (Mirostat 2)", neutral=Neutral((False,), "mirostat")
    )
    mirostat_tau: float = _value(1.5, "Mirostat's target surprise, in bits", "TAU", low=0)
    mirostat_eta: float = _value(
        0.1, "Mirostat's learning rate; 0: the bound stays at twice tau", "ETA", low=0
    )
    token_bias: tuple[tuple[int, Annotated[float, AllowInfNan()]], ...] = ()
    cfg_scale: float | None = _value(
        None,
        "weight of the prompt against the second one; 1: the prompt alone; empty: off",
        "S",
        neutral=Neutral((None,), "cfg", 1.0),
    )
    dry_multiplier: float = _value(
        0.0,
        "DRY: penalty for a token that continues a repetition; 0: off",
        "M",
        low=0,
        neutral=Neutral((0,), "dry"),
    )
    dry_base: float = _value(
        1.75, "DRY: growth of the penalty per token of the repetition", "B", low=0
    )
    dry_allowed_length: int = _value(2, "DRY: shortest repetition that is penalized", "N", low=1)
    dry_range: int = _value(0, "DRY: tokens back that are searched; 0: all", "N", low=0)
    dry_max_ngram: int = _value(20, "DRY: longest repetition that counts", "N", low=1, high=1024)
    dry_counts: bool = _value(True, "DRY: multiply the penalty by how often the token followed")
    dry_breakers: tuple[int, ...] | None = None
    xtc_probability: float = _value(
        0.0,
        "XTC: share by which all likely tokens but the last lose",
        "P",
        low=0,
        high=1,
        neutral=Neutral((0,), "sorts"),
    )
    xtc_threshold: float = _value(
        0.1, "XTC: probability from which a token counts as likely", "P", low=0, high=1
    )
    xtc_ignored: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.metadata and value is not each.default:
                _check(each, value)
        if self.repetition_penalty == 0:
            raise ConfigError(
                f"`repetition_penalty` is {as_typed(self.repetition_penalty)}; it must be above 0"
            )
        if self.dry_multiplier and 0 < self.dry_range <= self.dry_max_ngram:
            raise ConfigError(
                f"`dry_range` is {self.dry_range}; it must be above `dry_max_ngram`, "
                f"{self.dry_max_ngram}, or 0"
            )
        for token, bias in self.token_bias:
            if token < 0 or math.isnan(bias) or bias == math.inf:
                raise ConfigError(
                    f"`token_bias` has ({token}, {bias}); it must have ids from 0 and numbers, "
                    "-inf to exclude an id"
                )

    @classmethod
    def greedy(cls, **overrides: Any) -> Self:
        """Return settings that always take the likeliest token; penalties may be given."""
        return cls(**{"temperature": 1.0, "top_k": 1, "top_p": 0.0, **overrides})

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def steps(self) -> set[Step]:
        """The steps that these settings switch on."""
        found = {step for name, values, step in SWITCHES if getattr(self, name) not in values}
        if self.max_temp > self.min_temp:
            found.add("rest")
        return found

    @property
    def numbers(self) -> dict[str, float]:
        """The values by name; a number that changes nothing for each that is off."""
        found = {name: getattr(self, name) for name in NEUTRALS}
        for name, neutral in NEUTRALS.items():
            if neutral.number is not None and found[name] in neutral.values:
                found[name] = neutral.number
        return found


NEUTRALS: dict[str, Neutral] = {
    each.name: each.metadata["neutral"] for each in fields(SamplingSettings) if each.metadata
}
SWITCHES = [(name, one.values, one.step) for name, one in NEUTRALS.items() if one.step]


def _check(field: "Field[Any]", value: Any) -> None:
    """Refuse a value of another type, or one that is not finite or out of bounds.

    Raises:
        ConfigError: naming the value.
    """
    low, high = field.metadata["low"], field.metadata["high"]
    kind: type = Integral if isinstance(field.default, int) else Real
    is_number = isinstance(value, kind)
    if not is_number:
        rule = "a whole number" if kind is Integral else "a number"
    elif not abs(value) <= sys.float_info.max:  # nor NaN
        rule = "a finite number"
    elif low is not None and not low <= value <= high:
        rule = f"{low} or more" if high == math.inf else f"between {low} and {high}"
    else:
        return
    raise ConfigError(f"`{field.name}` is {as_typed(value)}; it must be {rule}")
