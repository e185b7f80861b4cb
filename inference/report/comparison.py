"""Compare models of one source: does the divergence fall as the bytes rise?"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exl2flow.core import words
from exl2flow.core.errors import SourceModelError
from exl2flow.inference.evaluate import Score
from exl2flow.inference.report.inspection import ModelContents, inspect_model
from exl2flow.inference.report.record import read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A scored model, described by its folder.

    label: distinguishes it from the others of the set.
    series: shared by models that differ in nothing but their bits; None if unknown.
    bpw: bits per weight of the layers' matrices, None if it is not EXL2.
    kl: measured divergence in nats, None without a reference; predicted_kl: the estimated one.
    """

    label: str
    series: str | None
    bpw: float | None
    bytes: int
    kl: float | None
    predicted_kl: float | None

    def to_json(self) -> dict[str, object]:
        """Return the fields that a score lacks."""
        return {"bpw": self.bpw, "series": self.series, "predicted_kl": self.predicted_kl}


def known_score(folder: Path) -> Score | None:
    """Return the score that validation gave a converted model, None if there is none."""
    record = read_record(folder)
    if record is None or record.score is None:
        return None
    return Score.of(str(folder), record.score)


def compared(scores: Sequence[Score]) -> list[Compared]:
    """Describe scored models by their folders, in the same order."""
    labels = _labels([Path(score.model) for score in scores])
    return [_compared(score, label) for score, label in zip(scores, labels, strict=True)]


def _compared(score: Score, label: str) -> Compared:
    contents = _contents(Path(score.model))
    record = contents and contents.record
    return Compared(
        label=label,
        series=record.series if record else None,
        bpw=contents.bpw if contents else None,
        bytes=score.bytes,
        kl=score.kl_divergence,
        predicted_kl=record.predicted_kl if record else None,
    )


def _contents(folder: Path) -> ModelContents | None:
    """Return the contents of an EXL2 folder, None for other folders."""
    try:
        return inspect_model(folder)
    except SourceModelError:
        return None


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, or as much of their paths as distinguishes them."""
    resolved = [folder.resolve() for folder in folders]
    names = [path.name for path in resolved]
    if len(set(names)) == len(set(resolved)):
        return names
    common = os.path.commonpath([path.parent for path in resolved])
    return [str(path.relative_to(common)) for path in resolved]


def by_series(models: Sequence[Compared]) -> dict[str | None, list[Compared]]:
    """Return series → its models; None for all whose series is unknown."""
    found: dict[str | None, list[Compared]] = {}
    for model in models:
        found.setdefault(model.series, []).append(model)
    return found


def check_bitrates(models: Sequence[Compared]) -> tuple[str, list[str]]:
    """Check that more bytes bring the models of a series closer to their source.

    EXL2 models of unknown series, such as those of another program, count as one series.

    Returns:
        A sentence that lists the series of two and more models for which this holds, or nothing;
        and a warning for each model that diverges more than a smaller one.
    """
    sound, warnings = [], []
    for series, members in by_series(models).items():
        measured = [model for model in members if model.kl is not None and model.bpw is not None]
        found = _rises(measured)
        warnings += found
        if len({model.bytes for model in measured}) > 1 and not found:
            sound.append(f"{series or 'others'} ({len(measured)} models)")
    text = f"KL divergence falls as bytes rise: {', '.join(sound)}" if sound else ""
    return text, warnings


def _rises(models: Sequence[Compared]) -> list[str]:
    """Return a sentence for each model that diverges more than a smaller one."""
    texts = []
    for model in sorted(models, key=lambda m: (m.bytes, _divergence(m))):
        smaller = [m for m in models if m.bytes < model.bytes]
        best = min(smaller, key=_divergence, default=model)
        if _divergence(best) < _divergence(model):
            texts.append(
                f"KL divergence rises with bytes: `{model.label}` has {_stated(model)}, "
                f"`{best.label}` {_stated(best)}"
            )
    return texts


def _stated(model: Compared) -> str:
    return f"{words.divergence(model.kl)} nats at {words.size(model.bytes)}"


def _divergence(model: Compared) -> float:
    return 0.0 if model.kl is None else model.kl
