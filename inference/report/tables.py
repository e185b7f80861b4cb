"""The tables of all reports as rows of words; Markdown, HTML, terminal, Prefect and card show them.

Every row of a table has the same columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from exl2flow.core import words
from exl2flow.inference.report.comparison import Compared
from exl2flow.inference.report.costs import Priced, share, total_nats

Row = dict[str, str]  # column → cell


def score_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return what validation found of source and result; what is unknown has no row."""
    score, calibration = report["score"], report["calibration"]
    texts = {"held-out": score, "calibration": calibration or {}}
    perplexities = {
        f"perplexity, {found['tokens']:,} {text} tokens": (
            words.perplexity(found["reference_perplexity"]),
            words.perplexity(found["perplexity"]),
        )
        for text, found in texts.items()
        if found
    }
    divergences = {
        "mean (nats)": score["kl_divergence"],
        "mean on calibration tokens": calibration and calibration["kl_divergence"],
        "estimated, sum over matrices": report.get("predicted_kl"),
        "median": score["kl_median"],
        "99th percentile": score["kl_p99"],
    }
    cells = {
        **perplexities,
        **{
            f"KL divergence, {what}": ("", words.divergence(value))
            for what, value in divergences.items()
            if value is not None
        },
        "top-1 agreement": ("", words.percent(score["top1_agreement"])),
        "weights on disk": (words.size(report["source_bytes"]), words.size(score["bytes"])),
    }
    return [{"": what, "source": s, "result": r} for what, (s, r) in cells.items()]


def bitrate_row(model: Compared, score: Mapping[str, Any]) -> Row:
    """Return a model beside others of its source; `score` has the fields of `Score`, or none."""
    return {
        "model": model.label,
        "bits per weight": words.bits(model.bpw),
        "size": words.size(model.bytes),
        "perplexity": words.perplexity(score.get("perplexity")),
        "KL divergence": words.divergence(model.kl),
        "KL p99": words.divergence(score.get("kl_p99")),
        "estimated KL": words.divergence(model.predicted_kl),
        "top-1 agreement": words.percent(score.get("top1_agreement")),
    }


def scored_on(score: Mapping[str, Any]) -> str:
    """Say what the figures of a table of bitrates were measured on."""
    text = f"Scored on {score['tokens']:,} tokens"
    if score["reference_perplexity"] is None:
        return text
    source = words.perplexity(score["reference_perplexity"])
    return f"{text}; source perplexity {source}; KL divergence in nats"


def cost_rows(items: Sequence[Priced], total: float | None) -> list[Row]:
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


def sublayer_row(name: str, items: Sequence[Priced], found: Mapping[str, Any]) -> Row:
    """Return a sublayer or the head; `found` has its `bpw` and `rel_err`, `items` its matrices."""
    return {
        "sublayer": words.short(name),
        "bits per weight": words.bits(found["bpw"]),
        "cost (nats)": words.cost(total_nats(items)),
        "relative error": words.error(found["rel_err"]),
    }


def markdown_table(rows: Sequence[Row]) -> str:
    """Return at least one row as Markdown."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    head, *body = (f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
