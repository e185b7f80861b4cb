"""Format results for people: words, digits and units of all reports.

Sizes are decimal, as disks and the Hub count them: 1 GB is 10⁹ bytes.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial

UNKNOWN = "–"
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
LIKE = 0.65  # similarity from which a name may have been meant: `/tokn`, but not `/nonsense`
LAYERS = re.compile(r"\b(?:language_model\.|model\.)+layers\.")


def fixed(value: float | None, digits: int) -> str:
    """Return a number, or a dash for one that is unknown."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


bits = partial(fixed, digits=3)  # per weight
perplexity = partial(fixed, digits=4)
divergence = partial(fixed, digits=5)  # KL divergence in nats
error = partial(fixed, digits=4)  # relative


def cost(value: float | None) -> str:
    """Return the cost in nats of one matrix or sublayer, which may be tiny: two digits."""
    return UNKNOWN if value is None else f"{value:#.2g}"


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share of 1 in percent."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def interval(bounds: tuple[float, float] | None, figure: Callable[[float], str]) -> str:
    """Return an interval with bounds written like a figure, a dash for an unknown one."""
    return UNKNOWN if bounds is None else f"{figure(bounds[0])} to {figure(bounds[1])}"


def spread(values: Sequence[float | None], figure: Callable[[float | None], str]) -> str:
    """Return the mean of values, and the least and the most if there are several."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return UNKNOWN
    mean = figure(sum(known) / len(known))
    return mean if len(known) == 1 else f"{mean} ({figure(min(known))} to {figure(max(known))})"


def unit(count: float) -> tuple[str, float]:
    """Return the unit that suits a number of bytes, and how many bytes it has."""
    return next(((name, width) for name, width in UNITS if count >= width), ("B", 1.0))


def size(count: float) -> str:
    """Return a number of bytes in kB, MB or GB."""
    name, width = unit(count)
    return f"{count:.0f} B" if name == "B" else f"{count / width:.2f} {name}"


def size_to_ask_for(count: float) -> str:
    """Return a size as an option takes it, rounded up to a tenth of its unit: `11.1GB`."""
    name, width = unit(max(count, 1e6))
    return f"{math.ceil(10 * count / width) / 10:.1f}{name}"


def as_typed(value: object) -> str:
    """Return a value as a person writes it: 9 for 9.0."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def cause(error: BaseException) -> str:
    """Return what an error says, without its class, its number and the file."""
    match error:
        case OSError():
            return error.strerror or str(error) or type(error).__name__
        case KeyError():
            return f"`{error.args[0]}` is missing"
    return str(error)


def nearest(name: str, names: Collection[str]) -> str:
    """Return which of the names may have been meant, else all, as the end of a message."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=LIKE)
    listed = ", ".join(f"`{each}`" for each in near or sorted(names))
    return f"; {'near' if near else 'there'} are {listed}" if listed else ""


def short(text: str) -> str:
    """Return a text in which sublayers and matrices lack the prefix that all of them share."""
    return LAYERS.sub("", text)
