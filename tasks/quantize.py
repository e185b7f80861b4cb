"""What the run's page shows of quantization: the error of every sublayer and of the head."""

from exl2flow.core.stage import Pipeline
from exl2flow.model import resolve
from exl2flow.quant.quantize import read_report, result_files
from exl2flow.tasks.artifacts import Artifacts, Row


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a table with a row per sublayer, and one of the head."""
    folder = pipeline.path("quantize")
    spec = resolve(pipeline.config.source)
    rows = [_row(read_report(folder / name)) for name in result_files(spec)]
    artifacts.table(
        "errors", rows, f"{pipeline.config.run_name}: relative error of outputs and of projections"
    )


def _row(report: dict[str, object]) -> Row:
    projections = report["projections"]
    assert isinstance(projections, dict)
    row: Row = {
        "sublayer": str(report["name"]),
        "bits per weight": round(float(str(report["bpw"])), 4),
        "relative error": round(float(str(report["rel_err"])), 6),
    }
    return row | {name: round(item["rel_err"], 6) for name, item in projections.items()}
