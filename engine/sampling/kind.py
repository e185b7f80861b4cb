"""Sampling settings as numbers for the device, and the sampler steps that they need."""

import math
from collections.abc import Iterable
from typing import Self

from exl2flow.core.options.sampling import SamplingSettings, Step
from exl2flow.kernels import SamplerSteps

FEW = 64  # settings that keep at most this many candidates share the same operations
LONG = 32  # repetitions of at most this length share the same operations
MOST_GUIDANCE = 1e6  # beyond it, products with logits may not be finite
EVERYTHING = 2**31  # more than any vocabulary or history has


def numbers_of(settings: SamplingSettings) -> dict[str, float]:
    """Return a slot's numbers by column; a disabled step has a value that changes nothing.

    `repetition_range` is where penalties end, `repetition_decay` the steps to there; the late
    temperature goes from `min_temp` to `max_temp`; `skew` is an exponent; `dry_counts` a most.
    """
    s, unit, numbers = settings, max(settings.repetition_decay, 1), settings.numbers
    is_late = s.temperature_last and not s.is_greedy
    low = high = s.temperature if is_late else 1.0
    if s.max_temp > s.min_temp:
        low, high = s.min_temp, s.max_temp
    return numbers | {
        "temperature": 1.0 if s.is_greedy or is_late else s.temperature,
        "temperature_last": is_late,
        "min_temp": low,
        "max_temp": high,
        "top_k": max_candidates(s),
        "skew": math.exp(-max(-700.0, min(s.skew, 700.0))),
        "repetition_range": (EVERYTHING if s.repetition_range < 0 else s.repetition_range) + unit,
        "repetition_decay": unit,
        "mirostat_eta": s.mirostat_eta if s.mirostat else 0.0,
        "cfg_scale": max(-MOST_GUIDANCE, min(numbers["cfg_scale"], MOST_GUIDANCE)),
        "dry_range": s.dry_range or EVERYTHING,
        "dry_counts": EVERYTHING if s.dry_counts else 1,
    }


def max_candidates(settings: SamplingSettings) -> int:
    """Return how many candidates the settings keep at most."""
    return 1 if settings.is_greedy else min(settings.top_k or EVERYTHING, EVERYTHING)


class Kind(SamplerSteps):
    """The steps that a call of `sample` launches; one recording serves all of a kind."""

    __slots__ = ()

    @classmethod
    def of(
        cls,
        settings: Iterable[SamplingSettings],
        *,
        masked: bool = False,
        top: int = 0,
        probabilities: bool = False,
    ) -> Self:
        """Return the kind that serves all these settings, of the slots in use.

        masked: some slots have a mask of allowed ids. top: likeliest tokens wanted, rounded up to a
        power of two. probabilities: wanted for some sampled tokens.
        """
        settings, top = tuple(settings), _power(top) if top else 0
        steps = [(s.steps, max_candidates(s)) for s in settings]
        needed = set[Step]().union(*(each for each, _ in steps))
        moving = set[Step]().union(*(each for each, most in steps if most > 1))
        sorts = "sorts" in moving
        rest = sorts or "rest" in moving or "mirostat" in needed
        lengths = [max(LONG, _power(s.dry_max_ngram)) for s in settings if s.dry_multiplier]
        most = max((most for _, most in steps), default=1)
        if most > 1 or rest or top:
            most = max(FEW, _power(most), top)
        return cls(
            most=None if most >= EVERYTHING else most,
            top=top,
            probabilities=probabilities,
            cfg="cfg" in needed,
            penalties="penalties" in needed,
            bias=any(s.token_bias for s in settings),
            dry=max(lengths, default=0),
            masked=masked,
            rest=rest,
            sorts=sorts,
        )


def _power(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
