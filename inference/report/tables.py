"""The tables of all reports as rows of words; Markdown, HTML, terminal, Prefect and card show them.

Every row of a table has the same columns.
"""

from collections.abc import Sequence

from exl2flow.core import words
from exl2flow.core.reports import (
    Intervals,
    MatrixReport,
    Report,
    RowSums,
    Score,
    SublayerReport,
    total_nats,
)
from exl2flow.inference.report.comparison import Compared, differences
from exl2flow.inference.report.costs import share
from exl2flow.inference.scoring.intervals import LEAST_ROWS

Row = dict[str, str]  # column → cell
CERTAINTY = "95 % interval"
NO_INTERVALS = Intervals(perplexity=None, kl_divergence=None, top1_agreement=None)


def score_rows(report: Report) -> list[Row]:
    """Return the scores of source and result from validation; unknown ones have no row."""
    score, calibration = report.score, report.calibration
    sure = score.intervals or NO_INTERVALS
    cross = (calibration and calibration.intervals) or NO_INTERVALS
    perplexities = {
        f"perplexity, {scored.tokens:,} {text} tokens": (
            words.perplexity(scored.reference_perplexity),
            words.perplexity(scored.perplexity),
            words.interval((scored.intervals or NO_INTERVALS).perplexity, words.perplexity),
        )
        for text, scored in _texts(report).items()
    }
    divergences = {
        "mean (nats)": (score.kl_divergence, sure.kl_divergence),
        "mean on calibration tokens": (
            None if calibration is None else calibration.kl_divergence,
            cross.kl_divergence,
        ),
        "estimated, sum over matrices": (report.predicted_kl, None),
        "median": (score.kl_median, None),
        "99th percentile": (score.kl_p99, None),
    }
    cells = {
        **perplexities,
        **{
            f"KL divergence, {what}": (
                "",
                words.divergence(value),
                words.interval(bounds, words.divergence),
            )
            for what, (value, bounds) in divergences.items()
            if value is not None
        },
        "top-1 agreement": (
            "",
            words.percent(score.top1_agreement),
            words.interval(sure.top1_agreement, words.percent),
        ),
        "weights on disk": (words.size(report.source_bytes), words.size(score.bytes), ""),
    }
    rows = [{"": w, "source": s, "result": r, CERTAINTY: i} for w, (s, r, i) in cells.items()]
    if all(row[CERTAINTY] in ("", words.UNKNOWN) for row in rows):
        return [{name: row[name] for name in ("", "source", "result")} for row in rows]
    return [{**row, CERTAINTY: row[CERTAINTY].replace(words.UNKNOWN, "")} for row in rows]


def _texts(report: Report) -> dict[str, Score]:
    """Return which text → its score."""
    texts = {"held-out": report.score, "calibration": report.calibration}
    return {text: score for text, score in texts.items() if score is not None}


def bitrate_row(model: Compared) -> Row:
    """Return the figures of a model beside others of its source."""
    score = model.score
    return {
        "model": model.label,
        "bits per weight": words.bits(model.bpw),
        "size": words.size(model.bytes),
        "perplexity": words.perplexity(getattr(score, "perplexity", None)),
        "KL divergence": words.divergence(model.kl),
        "KL p99": words.divergence(getattr(score, "kl_p99", None)),
        "estimated KL": words.divergence(model.predicted_kl),
        "top-1 agreement": words.percent(getattr(score, "top1_agreement", None)),
    }


def certainty_rows(models: Sequence[Compared]) -> list[Row]:
    """Return the intervals of models and of the steps from each to the next larger of its series.

    Nothing is returned if none is known.
    """
    rows = [_certainty(model.label, model.intervals) for model in models if model.intervals]
    return rows + [
        _certainty(f"{step.model.label} minus {step.minus.label}", step.intervals)
        for step in differences(models)
    ]


def _certainty(name: str, intervals: Intervals) -> Row:
    return {
        "model": name,
        "perplexity": words.interval(intervals.perplexity, words.perplexity),
        "KL divergence": words.interval(intervals.kl_divergence, words.divergence),
        "top-1 agreement": words.interval(intervals.top1_agreement, words.percent),
    }


def scored_on(score: Score) -> str:
    """Describe the text and the certainty of the figures in a table of bitrates."""
    text = f"Scored on {score.tokens:,} tokens"
    if score.reference_perplexity is not None:
        source = words.perplexity(score.reference_perplexity)
        text += f"; source perplexity {source}; KL divergence in nats"
    return f"{text}; {rows_in_words(score.rows)}"


def rows_in_words(rows: RowSums | None) -> str:
    """Say how many rows intervals rest on, or why there are none."""
    if rows is None:
        return "no intervals, because the scores of its rows were not recorded"
    count = len(rows.tokens)
    if count < LEAST_ROWS:
        return f"no intervals, because {count} rows are fewer than {LEAST_ROWS}"
    return f"95 % intervals over {count} rows"


def report_rows_in_words(report: Report) -> str:
    """Say the same for a report of one conversion, whose two texts may have different rows."""
    sentences = {text: rows_in_words(score.rows) for text, score in _texts(report).items()}
    if len(set(sentences.values())) == 1:
        return sentences["held-out"]
    return "; ".join(f"{text} text: {sentence}" for text, sentence in sentences.items())


def cost_rows(items: Sequence[MatrixReport], total: float | None) -> list[Row]:
    """Return a row per matrix with its share of a total cost."""
    return [
        {
            "matrix": words.short(item.key),
            "parameters": item.params or "",
            "bits per weight": words.bits(item.bpw),
            "cost (nats)": words.cost(item.nats),
            "share": words.percent(share(item, total), 1),
            "relative error": words.error(item.rel_err),
        }
        for item in items
    ]


def sublayer_row(layer: SublayerReport) -> Row:
    """Return a sublayer, a layer's experts or the head, with the sum of its matrices' costs."""
    return {
        "sublayer": words.short(layer.name),
        "bits per weight": words.bits(layer.bpw),
        "cost (nats)": words.cost(total_nats(layer.matrices)),
        "relative error": words.error(layer.rel_err),
    }


def markdown_table(rows: Sequence[Row]) -> str:
    """Return rows as Markdown; nothing if there are none."""
    if not rows:
        return ""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    head, *body = (f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
