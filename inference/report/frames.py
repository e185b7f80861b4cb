"""Measurements, allocations and scores as pandas DataFrames, for notebooks and scripts.

Rows are tidy, units are in the names of the columns, and what is unknown is NaN. This file alone
imports pandas, so that only its users wait for it.
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import torch

from exl2flow.core import words
from exl2flow.core.errors import ConfigError, CorruptCheckpoint
from exl2flow.core.reports import Intervals, Json
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import RECORD_FILE, SOURCE_FINGERPRINT
from exl2flow.inference.report.blocks import role_of
from exl2flow.inference.report.comparison import compared, known_score
from exl2flow.inference.report.inspection import ModelContents, inspect_model
from exl2flow.inference.report.record import read_object
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.model.files.measured import ARRAYS, MeasuredArrays, Option, read_arrays

FIGURES = {  # column → field of a score
    "perplexity": "perplexity",
    "source_perplexity": "reference_perplexity",
    "kl_divergence_nats": "kl_divergence",
    "kl_median_nats": "kl_median",
    "kl_p99_nats": "kl_p99",
    "top1_agreement": "top1_agreement",
}
BOUNDED = ("perplexity", "kl_divergence_nats", "top1_agreement")  # columns with intervals
BOUNDS = [f"{column}_{end}" for column in BOUNDED for end in ("low", "high")]
MEASURED = ("slot", "candidate", "parameters", "stored_bits", "relative_error", "cost_nats")


def measurement_frame(path: Path | str) -> pd.DataFrame:
    """Return a `measurement.json`, ours or exllamav2's: one row per candidate of each slot.

    The arrays of a measurement of very many matrices are read from the file beside it.
    A slot is a matrix or, as exllamav2 measures, a sublayer, whose parameters are listed by
    projection. Relative errors are those of the slot's output; `cost_nats` is the estimated KL
    divergence that they cause.

    Raises:
        ConfigError: the file is not a measurement.
    """
    try:
        content = read_json(Path(path))
        if ARRAYS in content:
            return _array_frame(read_arrays(Path(path), content[ARRAYS]))
        rows = [
            _candidate(slot, index, entry)
            for slot, entries in content["measurement"].items()
            for index, entry in enumerate(entries or ())
        ]
    except (
        AttributeError,
        CorruptCheckpoint,
        KeyError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(
            f"`{path}` cannot be read as a measurement ({words.cause(error)}); give a "
            "`measurement.json` that `exl2flow measure` or exllamav2 wrote"
        ) from error
    return pd.DataFrame(rows, columns=list(MEASURED)).astype({"cost_nats": float})


def _array_frame(measured: MeasuredArrays) -> pd.DataFrame:
    """Return the same of arrays."""
    texts = [list(map(_listed, listed.options)) for listed in measured.lists]
    lists = list(measured.slots.values())
    lengths = torch.tensor([len(texts[index]) for index in lists])
    used = torch.arange(measured.accuracy.shape[1]) < lengths[:, None]
    slots, candidates = (place.numpy() for place in used.nonzero(as_tuple=True))
    nats = None if measured.nats is None else measured.nats[used].double().numpy()
    columns = (
        pd.Series(list(measured.slots)).to_numpy()[slots],
        candidates,
        [text for index in lists for text in texts[index]],
        [bits for index in lists for bits in measured.lists[index].bits],
        1 - measured.accuracy[used].double().numpy(),
        float("nan") if nats is None else nats,
    )
    return pd.DataFrame(dict(zip(MEASURED, columns, strict=True)))


def _listed(option: Option) -> str:
    if len(option) == 1:
        return "".join(map(str, option.values()))
    return "; ".join(f"{name} {params}" for name, params in option.items())


def _candidate(slot: str, index: int, entry: Json) -> Json:
    params = {k: str(QuantParams.from_json(v)) for k, v in entry.items() if isinstance(v, dict)}
    listed = [f"{name} {text}" for name, text in params.items()]
    cells = (
        slot,
        index,
        "; ".join(listed) if len(params) > 1 else "".join(params.values()),
        int(entry["total_bits"]),
        1 - float(entry["accuracy"]),
        entry.get("nats"),
    )
    return dict(zip(MEASURED, cells, strict=True))


def allocation_frame(model: Path | str | ModelContents) -> pd.DataFrame:
    """Return one row per quantized matrix of an EXL2 model, in model order.

    `stored_bytes` and `bits_per_weight` count everything stored for a matrix. Parameters, errors
    and costs are known for models that exl2flow wrote.

    Args:
        model: its folder, or what `inspect_model` returned.

    Raises:
        Exl2FlowError: as `inspect_model`.
    """
    contents = model if isinstance(model, ModelContents) else inspect_model(Path(model))
    return pd.DataFrame(
        {
            "matrix": matrix.key,
            "sublayer": part.name,
            "in_features": matrix.shape[0],
            "out_features": matrix.shape[1],
            "parameters": matrix.params,
            "bit_widths": "/".join(map(str, matrix.rows)),
            "group_sizes": "/".join(map(str, matrix.group_sizes)),
            "groups": matrix.groups,
            "bits_per_weight": matrix.bpw,
            "stored_bytes": matrix.bits // 8,
            "cost_nats": matrix.nats,
            "relative_error": matrix.rel_err,
        }
        for part in contents.parts
        for matrix in part.matrices
    ).astype({"cost_nats": float, "relative_error": float})


def role_frame(model: Path | str | ModelContents) -> pd.DataFrame:
    """Return one row per sublayer and role of its matrices: their number, and what they add up to.

    The experts of a layer share a row for each role; `_least` and `_most` tell how they differ.
    Costs are added up. For a dense model there is a row per matrix.

    Args:
        model: see `allocation_frame`, whose columns these are.
    """
    frame = allocation_frame(model)
    frame["role"] = [role_of(words.short(matrix)) for matrix in frame["matrix"]]
    figures = ("bits_per_weight", "relative_error")
    ends = (("", "mean"), ("_least", "min"), ("_most", "max"))
    columns = {f"{name}{end}": (name, how) for name in figures for end, how in ends}
    groups = frame.groupby(["sublayer", "role"], sort=False)
    return groups.agg(
        matrices=("matrix", "size"),
        stored_bytes=("stored_bytes", "sum"),
        **columns,
        cost_nats=("cost_nats", lambda costs: costs.sum(skipna=False)),
    ).reset_index()


def score_frame(models: Iterable[Path | str]) -> pd.DataFrame:
    """Return one row per converted model, with its scores from validation.

    Figures of two models can be compared if `source_fingerprint` and `text` are equal: the digests
    of the source's files and of the scored tokens. Records of older versions have no fingerprint;
    for them `source`, the folder, must be equal. Columns in `_low` and `_high` are the ends of 95 %
    intervals.

    Raises:
        ConfigError: a model has no score.
    """
    folders = [Path(model) for model in models]
    known = {folder: known_score(folder) for folder in folders}
    scores = [score for score in known.values() if score is not None]
    if missing := [f"`{folder}`" for folder, score in known.items() if score is None]:
        raise ConfigError(
            f"{', '.join(missing)} has no score of these files; give folders that `exl2flow "
            "convert` wrote and validated"
        )
    rows = [
        {
            "model": model.label,
            "series": model.series,
            "bits_per_weight": model.bpw,
            "size_bytes": model.bytes,
            **{column: getattr(score, field) for column, field in FIGURES.items()},
            "estimated_kl_nats": model.predicted_kl,
            "tokens": score.tokens,
            "rows": None if score.rows is None else len(score.rows.tokens),
            "text": score.text,
            "source": record.get("source"),
            SOURCE_FINGERPRINT: record.get(SOURCE_FINGERPRINT),
            **_bounds(score.intervals),
        }
        for score, model in zip(scores, compared(scores), strict=True)
        for record in [read_object(Path(score.model) / RECORD_FILE)]
    ]
    numbers = dict.fromkeys(("rows", *BOUNDS), float)
    return pd.DataFrame(rows).astype(numbers if rows else {})


def _bounds(intervals: Intervals | None) -> dict[str, float | None]:
    pairs = [getattr(intervals, FIGURES[column], None) for column in BOUNDED]
    ends = [end for pair in pairs for end in pair or (None, None)]
    return dict(zip(BOUNDS, ends, strict=True))
