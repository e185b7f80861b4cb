"""Sampling settings as numbers for the device, and the sampler steps that they need."""

import math
from collections.abc import Iterable
from typing import Self

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.kernels import SAMPLER_COLUMNS, SamplerSteps

FEW = 64  # settings that keep at most this many candidates share the same operations
LONG = 32  # repetitions of at most this length share the same operations
MOST_GUIDANCE = 1e6  # beyond it, products with logits may not be finite
EVERYTHING = 2**31  # more than any vocabulary or history has


def numbers_of(settings: SamplingSettings) -> dict[str, float]:
    """Return a slot's numbers by column; a disabled step has a value that changes nothing.

    `repetition_range` is where penalties end, `repetition_decay` the steps to there; the late
    temperature goes from `min_temp` to `max_temp`; `skew` is an exponent; `dry_counts` a most.
    """
    s, unit, scale = settings, max(settings.repetition_decay, 1), settings.cfg_scale
    is_late = s.temperature_last and not s.is_greedy
    low = high = s.temperature if is_late else 1.0
    if s.max_temp > s.min_temp:
        low, high = s.min_temp, s.max_temp
    return {name: getattr(s, name) for name in SAMPLER_COLUMNS} | {
        "temperature": 1.0 if s.is_greedy or is_late else s.temperature,
        "temperature_last": is_late,
        "min_temp": low,
        "max_temp": high,
        "top_k": max_candidates(s),
        "top_p": s.top_p if 0 < s.top_p < 1 else math.inf,
        "tfs": s.tfs if 0 < s.tfs < 1 else math.inf,
        "typical": s.typical if 0 < s.typical < 1 else math.inf,
        "skew": math.exp(-max(-700.0, min(s.skew, 700.0))),
        "repetition_range": (EVERYTHING if s.repetition_range < 0 else s.repetition_range) + unit,
        "repetition_decay": unit,
        "mirostat_eta": s.mirostat_eta if s.mirostat else 0.0,
        "cfg_scale": 1.0 if scale is None else max(-MOST_GUIDANCE, min(scale, MOST_GUIDANCE)),
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
        """Return the kind that serves all these settings.

        Args:
            settings: of the slots in use.
            masked: some of them have a mask of allowed ids.
            top: likeliest tokens wanted, rounded up to a power of two.
            probabilities: wanted for some sampled tokens.
        """
        settings, top = tuple(settings), _power(top) if top else 0
        several = [s for s in settings if max_candidates(s) > 1]  # one candidate stays what it is
        sorts = any(0 < s.typical < 1 or s.xtc_probability for s in several)
        rest = sorts or any(s.mirostat for s in settings) or any(_has_rest(s) for s in several)
        lengths = [max(LONG, _power(s.dry_max_ngram)) for s in settings if s.dry_multiplier]
        most = max((max_candidates(s) for s in settings), default=1)
        if most > 1 or rest or top:
            most = max(FEW, _power(most), top)
        return cls(
            most=None if most >= EVERYTHING else most,
            top=top,
            probabilities=probabilities,
            cfg=any(s.cfg_scale is not None for s in settings),
            penalties=any(
                s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
                for s in settings
            ),
            bias=any(s.token_bias for s in settings),
            dry=max(lengths, default=0),
            masked=masked,
            rest=rest,
            sorts=sorts,
        )


def _power(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _has_rest(s: SamplingSettings) -> bool:
    return bool(
        s.smoothing_factor
        or s.top_a
        or s.skew
        or s.temperature_last
        or 0 < s.tfs < 1
        or s.max_temp > s.min_temp
    )
