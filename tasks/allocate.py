"""What the run's page shows of bit allocation: the chosen parameters per sublayer."""

from exl2flow.core.files import read_json
from exl2flow.core.stage import Pipeline
from exl2flow.model import resolve
from exl2flow.model.exl2 import padded_columns
from exl2flow.quant.allocate import ALLOCATION_FILE, read_choice
from exl2flow.tasks.artifacts import Artifacts, Row


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a table with a row per sublayer."""
    folder = pipeline.path("allocate")
    allocation = read_json(folder / ALLOCATION_FILE)
    choice = read_choice(folder)
    rows: list[Row] = []
    for sublayer in resolve(pipeline.config.source).sublayers:
        chosen = allocation["choice"][sublayer.name]
        numel = sum(p.in_features * padded_columns(p.out_features) for p in sublayer.projections)
        row: Row = {
            "sublayer": sublayer.name,
            "bits per weight": round(chosen["total_bits"] / numel, 4),
            "relative error": round(1 - chosen["accuracy"], 6),
        }
        rows.append(row | {name: str(params) for name, params in choice[sublayer.name].items()})
    artifacts.table(
        "bit-allocation",
        rows,
        f"{pipeline.config.run_name}: {allocation['bpw']:.4f} bits per weight used of "
        f"{pipeline.config.bpw:g}, objective {allocation['objective']}",
    )
