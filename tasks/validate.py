"""What the run's page shows of validation: the report, its plot inside."""

import base64

from exl2flow.core.stage import Pipeline
from exl2flow.inference.validate import MARKDOWN_FILE, PLOT_FILE
from exl2flow.tasks.artifacts import Artifacts


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish the report as one self-contained page."""
    folder = pipeline.path("validate")
    plot = base64.b64encode((folder / PLOT_FILE).read_bytes()).decode()
    text = (folder / MARKDOWN_FILE).read_text(encoding="utf-8")
    page = f"{text}\n![bits and errors by sublayer](data:image/svg+xml;base64,{plot})\n"
    artifacts.markdown("report", page, f"{pipeline.config.run_name}: validation report")
