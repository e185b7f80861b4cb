"""Compare models of one source: does the divergence fall as the bytes rise?"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from exl2flow.core import words
from exl2flow.core.errors import SourceModelError
from exl2flow.core.reports import Interval, Intervals, Json, Score
from exl2flow.inference.report.inspection import inspect_model
from exl2flow.inference.report.record import read_record
from exl2flow.inference.scoring.intervals import intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A scored model, described by its folder.

    label: distinguishes it from the others of the set.
    series: shared by models that differ in nothing but their bits; None if unknown.
    bpw: bits per weight of the layers' matrices, None if it is not EXL2.
    kl: measured divergence in nats, None without a reference; predicted_kl: the estimated one.
    score: all that was measured, with its rows; None if unknown.
    """

    label: str
    series: str | None
    bpw: float | None
    bytes: int
    kl: float | None
    predicted_kl: float | None
    score: Score | None = None

    @property
    def intervals(self) -> Intervals | None:
        """95 % intervals of its figures, None if unknown."""
        return None if self.score is None else self.score.intervals

    def to_json(self) -> Json:
        """Return the fields that a score lacks."""
        return {"bpw": self.bpw, "series": self.series, "predicted_kl": self.predicted_kl}


def known_score(folder: Path) -> Score | None:
    """Return the score that validation gave a converted model, None if there is none."""
    record = read_record(folder)
    if record is None or record.score is None:
        return None
    return Score.of(str(folder), record.score)


def compared(scores: Sequence[Score], names: Mapping[str, str] = {}) -> list[Compared]:
    """Describe scored models by their folders, in the same order.

    names: folder → name of those that have another one than their folder.
    """
    labels = distinct_names([Path(names.get(score.model, score.model)) for score in scores])
    return [_compared(score, label) for score, label in zip(scores, labels, strict=True)]


def _compared(score: Score, label: str) -> Compared:
    contents = None
    with suppress(SourceModelError):  # not EXL2
        contents = inspect_model(Path(score.model))
    record = contents and contents.record
    return Compared(
        label=label,
        series=record.series if record else None,
        bpw=contents.bpw if contents else None,
        bytes=score.bytes,
        kl=score.kl_divergence,
        predicted_kl=record.predicted_kl if record else None,
        score=score,
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, or as much of their paths as distinguishes them."""
    resolved = [folder.resolve() for folder in folders]
    names = [path.name for path in resolved]
    if len(set(names)) == len(set(resolved)):
        return names
    common = os.path.commonpath([path.parent for path in resolved])
    return [str(path.relative_to(common)) for path in resolved]


def by_series(models: Sequence[Compared]) -> dict[str | None, list[Compared]]:
    """Return series → its models; None for all whose series is unknown."""
    series: dict[str | None, list[Compared]] = {}
    for model in models:
        series.setdefault(model.series, []).append(model)
    return series


def difference(model: Compared, other: Compared) -> Intervals | None:
    """Return intervals of a model's figures minus another's; None unless they share rows.

    The rows must be of one text, and at least `LEAST_ROWS`.
    """
    first, second = model.score, other.score
    if first is None or second is None or first.rows is None or second.rows is None:
        return None
    if first.text is None or first.text != second.text or first.rows.tokens != second.rows.tokens:
        return None
    return intervals(first.rows, second.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Intervals of a model's figures minus those of the next smaller model of its series."""

    model: Compared
    minus: Compared
    intervals: Intervals

    def to_json(self, name: Callable[[Compared], str]) -> Json:
        """Return the difference of two models, which `name` names."""
        return {
            "model": name(self.model),
            "minus": name(self.minus),
            "intervals": asdict(self.intervals),
        }


def differences(models: Sequence[Compared]) -> list[Difference]:
    """Return the differences between neighbours in size of each series, as far as known."""
    return [
        Difference(model=larger, minus=smaller, intervals=known)
        for members in by_series(models).values()
        for smaller, larger in pairwise(sorted(members, key=lambda model: model.bytes))
        if (known := difference(larger, smaller)) is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A model that diverges more than a smaller one; interval: of the difference, if known."""

    model: Compared
    smaller: Compared
    interval: Interval | None

    @property
    def is_sure(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.interval is not None and self.interval[0] > 0

    @property
    def warning(self) -> str:
        """A sentence with both divergences and sizes."""
        interval = "is not known"
        if self.interval is not None:
            interval = words.interval(self.interval, words.divergence)
        return (
            f"KL divergence rises with bytes: `{self.model.label}` has {_stated(self.model)}, "
            f"`{self.smaller.label}` {_stated(self.smaller)}; 95 % interval of the difference "
            f"{interval}"
        )

    @property
    def doubt(self) -> str:
        """A sentence that says why this may be chance."""
        text = f"`{self.model.label}` diverges no less than the smaller `{self.smaller.label}`"
        if self.interval is None:
            return f"{text}, but chance cannot be excluded, because there is no interval"
        interval = words.interval(self.interval, words.divergence)
        return f"{text}, but the 95 % interval of the difference, {interval}, includes zero"


def check_bitrates(models: Sequence[Compared]) -> tuple[str, list[str]]:
    """Check that more bytes bring the models of a series closer to their source.

    EXL2 models of unknown series, such as those of another program, count as one series. A model
    is warned of if the interval of its divergence minus a smaller one's lies above zero.

    Returns:
        A sentence that lists the series of two and more models for which this holds, and the models
        for which chance may decide, or nothing; and a warning for each model that diverges more
        than a smaller one.
    """
    sound, unsure, warnings = [], [], []
    for series, members in by_series(models).items():
        risen = rises(members)
        warnings += [rise.warning for rise in risen if rise.is_sure]
        unsure += [rise.doubt for rise in risen if not rise.is_sure]
        measured = _measured(members)
        if len({model.bytes for model in measured}) > 1 and not risen:
            sound.append(f"{series or 'others'} ({len(measured)} models)")
    text = [f"KL divergence falls as bytes rise: {', '.join(sound)}"] * bool(sound)
    return "; ".join(text + unsure), warnings


def rises(models: Sequence[Compared]) -> list[Rise]:
    """Return each model that diverges more than a smaller one, with the best smaller one."""
    risen, measured = list[Rise](), _measured(models)
    for model in sorted(measured, key=lambda m: (m.bytes, _divergence(m))):
        smaller = [m for m in measured if m.bytes < model.bytes]
        best = min(smaller, key=_divergence, default=model)
        if _divergence(best) < _divergence(model):
            between = difference(model, best)
            interval = None if between is None else between.kl_divergence
            risen.append(Rise(model=model, smaller=best, interval=interval))
    return risen


def _measured(models: Sequence[Compared]) -> list[Compared]:
    return [model for model in models if model.kl is not None and model.bpw is not None]


def _stated(model: Compared) -> str:
    return f"{words.divergence(model.kl)} nats at {words.size(model.bytes)}"


def _divergence(model: Compared) -> float:
    return 0.0 if model.kl is None else model.kl
