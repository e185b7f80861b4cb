"""Show bit allocation on the run's page: the chosen parameters of every matrix."""

from collections.abc import Mapping
from typing import Any

from exl2flow.core.files import read_json
from exl2flow.core.stage import NATS, Pipeline
from exl2flow.model import resolve
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.measure.measurement import projection_bits
from exl2flow.tasks.artifacts import Artifacts, Row, fixed

LEGEND = (
    "Parameters are shares of a matrix's in-features, with their bits and group size: "
    "`0.25:3b_32g/0.75:2b_32g s4` stores a quarter at 3 bits and the rest at 2, in groups of 32 "
    "that share a 4-bit scale."
)


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a table with one row per matrix."""
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
            "bits per weight": fixed(projection_bits(projection, params) / numel, 3),
            "parameters": str(params),
        }
        if allocation["objective"] == NATS:
            chosen = allocation["choice"].get(projection.key, {})
            row["cost (nats)"] = fixed(chosen.get("nats"), 6)
        rows.append(row)
    artifacts.table("bit-allocation", rows, f"Bits of every matrix{_result(allocation)} {LEGEND}")


def _result(allocation: Mapping[str, Any]) -> str:
    """Describe the result of the allocation."""
    text = f": {allocation['bpw']:.3f} bits per weight in the layers"
    if allocation["objective"] == NATS:
        text += f", estimated KL divergence {allocation['value']:.5f} nats"
    return f"{text}."
