"""What the run's page shows of quantization: errors of sublayers, and of every matrix its cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from exl2flow.core.stage import Pipeline
from exl2flow.inference.costs import MatrixCost, matrix_costs, share, total_nats
from exl2flow.model import resolve
from exl2flow.quant.quantize import read_report, result_files
from exl2flow.tasks.artifacts import Artifacts, Row

UNKNOWN = "–"


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a table with a row per sublayer and one of the head, and one with all matrices."""
    folder = pipeline.path("quantize")
    spec = resolve(pipeline.config.source)
    reports = [read_report(folder / name) for name in result_files(spec)]
    costs = matrix_costs(reports)
    name = pipeline.config.run_name
    total = total_nats(costs)
    estimate = "" if total is None else f", estimated KL divergence {total:.5f} nats"
    artifacts.table("errors", sublayer_rows(reports), f"{name}: errors of sublayers{estimate}")
    artifacts.table("matrices", matrix_rows(costs), f"{name}: errors of matrices and their cost")


def sublayer_rows(reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row per report, all with the same columns, for the page shows those of the first."""
    return [
        {
            "sublayer": str(report["name"]),
            "bits per weight": round(float(report["bpw"]), 4),
            "estimated nats": _brief(total_nats(matrix_costs([report]))),
            "relative error": round(float(report["rel_err"]), 6),
        }
        for report in reports
    ]


def matrix_rows(costs: Sequence[MatrixCost]) -> list[Row]:
    """Return a row per matrix, in model order."""
    total = total_nats(costs)
    return [_matrix_row(cost, share(cost, total)) for cost in costs]


def _matrix_row(cost: MatrixCost, part: float | None) -> Row:
    return {
        "matrix": cost.key,
        "parameters": cost.params,
        "bits per weight": UNKNOWN if cost.bpw is None else round(cost.bpw, 4),
        "estimated nats": _brief(cost.nats),
        "share of the estimate": UNKNOWN if part is None else f"{100 * part:.1f} %",
        "relative error": UNKNOWN if cost.rel_err is None else round(cost.rel_err, 6),
    }


def _brief(nats: float | None) -> str | float:
    return UNKNOWN if nats is None else float(f"{nats:.3g}")
