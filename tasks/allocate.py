"""The chosen parameters of every matrix, on the page of a run."""

import re
from collections.abc import Sequence

from exl2flow.core import words
from exl2flow.core.reports import AllocationReport
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import NATS, Pipeline
from exl2flow.inference.report.tables import Row
from exl2flow.model import ProjectionSpec, resolve
from exl2flow.quant.allocate.budget import ALLOCATION_FILE, read_choice
from exl2flow.quant.allocate.layout import Choice
from exl2flow.quant.measure.measurement import projection_bits
from exl2flow.tasks.artifacts import MOST_ROWS, Artifacts

EXPERT = re.compile(r"\.experts\.\d+\.")
LEGEND = (
    "Parameters list shares of a matrix's in-features with their bits and group size: "
    "`0.25:3b_32g/0.75:2b_32g s4` holds a quarter at 3 bits and the others at 2, in groups of 32 "
    "that share a scale of 4 bits."
)


def publish(pipeline: Pipeline, artifacts: Artifacts) -> None:
    """Publish a table with one row per matrix, or for very many per role of a layer's experts."""
    folder = pipeline.path("allocate")
    allocation = AllocationReport.from_json(read_json(folder / ALLOCATION_FILE))
    choice = read_choice(folder)
    spec = resolve(pipeline.config.source)
    rows = matrix_rows([*spec.projections, spec.head], choice, allocation)
    artifacts.table("bit-allocation", rows, f"Bits of every matrix{_result(allocation)} {LEGEND}")


def matrix_rows(
    projections: Sequence[ProjectionSpec], choice: Choice, allocation: AllocationReport
) -> list[Row]:
    """Return a row per matrix; of very many, experts of a layer that have one role share a row."""
    is_long = len(projections) > MOST_ROWS
    groups: dict[str, list[ProjectionSpec]] = {}
    for projection in projections:
        name = EXPERT.sub(".experts.*.", projection.key) if is_long else projection.key
        groups.setdefault(name, []).append(projection)
    rows: list[Row] = []
    for name, members in groups.items():
        params = str(choice[members[0].key])
        row: Row = {
            "matrix": words.short(name),
            "parameters": params if len(members) == 1 else f"{len(members)} matrices",
            "bits per weight": words.spread([_bpw(p, choice) for p in members], words.bits),
        }
        if allocation.objective == NATS:
            costs = [allocation.nats.get(p.key) for p in members]
            known = [cost for cost in costs if cost is not None]
            row["cost (nats)"] = words.cost(sum(known) if len(known) == len(costs) else None)
        rows.append(row)
    return rows


def _bpw(projection: ProjectionSpec, choice: Choice) -> float:
    bits = projection_bits(projection, choice[projection.key])
    return bits / (projection.in_features * projection.out_features)


def _result(allocation: AllocationReport) -> str:
    """Summarize the allocation in words."""
    text = f": {words.bits(allocation.bpw)} bits per weight in the layers"
    if allocation.objective == NATS:
        text += f", estimated KL divergence {words.divergence(allocation.value)} nats"
    return f"{text}."
