"""What the run's page shows of bit allocation: the chosen parameters of every matrix."""

from exl2flow.core.files import read_json
from exl2flow.core.stage import Pipeline
from exl2flow.model import resolve
from exl2flow.quant.allocate import ALLOCATION_FILE, read_choice
from exl2flow.quant.measurement import projection_bits
from exl2flow.tasks.artifacts import Artifacts, Row


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a table with a row per matrix."""
    folder = pipeline.path("allocate")
    allocation = read_json(folder / ALLOCATION_FILE)
    choice = read_choice(folder)
    spec = resolve(pipeline.config.source)
    rows: list[Row] = []
    for projection in (*(p for s in spec.sublayers for p in s.projections), spec.head):
        params = choice[projection.key]
        numel = projection.in_features * projection.out_features
        row: Row = {
            "matrix": projection.key,
            "parameters": str(params),
            "bits per weight": round(projection_bits(projection, params) / numel, 4),
        }
        chosen = allocation["choice"].get(projection.key)
        if chosen is not None:
            row["estimated nats"] = float(f"{chosen['nats']:.3g}")
        rows.append(row)
    artifacts.table(
        "bit-allocation",
        rows,
        f"{pipeline.config.run_name}: {allocation['bpw']:.4f} bits per weight, "
        f"objective {allocation['objective']}",
    )
