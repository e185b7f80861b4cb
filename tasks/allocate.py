"""The chosen parameters of every matrix, on the page of a run."""

from collections.abc import Mapping
from typing import Any

from exl2flow.core import words
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import NATS, Pipeline
from exl2flow.inference.report.tables import Row
from exl2flow.model import resolve
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.measure.measurement import projection_bits
from exl2flow.tasks.artifacts import Artifacts

LEGEND = (
    "Parameters list shares of a matrix's in-features with their bits and group size: "
    "`0.25:3b_32g/0.75:2b_32g s4` holds a quarter at 3 bits and the others at 2, in groups of 32 "
    "that share a scale of 4 bits."
)


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a table with one row per matrix."""
    folder = pipeline.path("allocate")
    allocation = read_json(folder / ALLOCATION_FILE)
    choice = read_choice(folder)
    spec = resolve(pipeline.config.source)
    rows: list[Row] = []
    for projection in (*spec.projections, spec.head):
        params = choice[projection.key]
        numel = projection.in_features * projection.out_features
        row: Row = {
            "matrix": words.short(projection.key),
            "parameters": str(params),
            "bits per weight": words.bits(projection_bits(projection, params) / numel),
        }
        if allocation["objective"] == NATS:
            chosen = allocation["choice"].get(projection.key, {})
            row["cost (nats)"] = words.cost(chosen.get("nats"))
        rows.append(row)
    artifacts.table("bit-allocation", rows, f"Bits of every matrix{_result(allocation)} {LEGEND}")


def _result(allocation: Mapping[str, Any]) -> str:
    """Summarize the allocation in words."""
    text = f": {words.bits(allocation['bpw'])} bits per weight in the layers"
    if allocation["objective"] == NATS:
        text += f", estimated KL divergence {words.divergence(allocation['value'])} nats"
    return f"{text}."
