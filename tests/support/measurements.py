"""Measurements in nats that need no measuring."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.measure.candidates import parse_params
from exl2flow.quant.measure.measurement import CandidateResult, Measurement, projection_bits
from exl2flow.quant.measure.results import Results

OPTION_LIST = """
2 g64 | 2 g32
3/2@0.1/0.9 g64 | 3/2@0.25/0.75 g64 | 3/2@0.5/0.5 g64 | 3/2@0.75/0.25 g64
3 g128 | 3 g64 | 3 g32
4/3@0.25/0.75 g128 | 4/3@0.5/0.5 g128 | 4/3@0.75/0.25 g128
4/3@0.1/0.9 g32 | 4/3@0.25/0.75 g32 | 4/3@0.5/0.5 g32
4 g128 | 4 g64 | 4 g32
5/4@0.25/0.75 g128 | 5/4@0.5/0.5 g128 | 5/4@0.75/0.25 g128
5/4@0.25/0.75 g32 | 5/4@0.5/0.5 g32
5 g128 | 5 g64 | 5 g32
6/5@0.25/0.75 g128 | 6/5@0.5/0.5 g128
6 g128 | 6 g32
8/6@0.5/0.5 g128
8 g128 | 8 g32
"""
HEAD_OPTION_LIST = """
3 g128 | 3 g64
4/3@0.25/0.75 g128 | 4/3@0.5/0.5 g128 | 4/3@0.75/0.25 g128
4 g128 | 4 g64
5/4@0.25/0.75 g128 | 5/4@0.5/0.5 g128
5 g128 | 5 g64
6/5@0.15/0.85 g128 | 6/5@0.5/0.5 g128
6 g128
8/6@0.15/0.85 g128
8 g128
"""


def _parse(text: str) -> tuple[QuantParams, ...]:
    return tuple(parse_params(cell) for cell in text.replace("\n", "|").split("|") if cell.strip())


OPTIONS, HEAD_OPTIONS = _parse(OPTION_LIST), _parse(HEAD_OPTION_LIST)


def decoder_projections(spec: ModelSpec) -> list[ProjectionSpec]:
    """Return the projections of all sublayers, in order."""
    return [p for sublayer in spec.sublayers for p in sublayer.projections]


def slot(projection: ProjectionSpec, options: Sequence[QuantParams], *, weight: float) -> Results:
    """Return candidates of a projection whose cost is a quarter for every further bit."""
    numel = projection.in_features * projection.out_features
    results = []
    for params in options:
        bits = projection_bits(projection, params)
        error = 2 ** (-bits / numel)
        results.append(
            CandidateResult(
                accuracy=1 - error / 2,
                total_bits=bits,
                params={projection.name: params},
                nats=weight * error**2,
            )
        )
    return Results.of(results)


def measured_in_nats(
    spec: ModelSpec,
    *,
    options: Sequence[QuantParams] = OPTIONS,
    head_options: Sequence[QuantParams] = HEAD_OPTIONS,
    seed: int = 0,
) -> Measurement:
    """Return a measurement by projection; projections differ in how much their errors cost."""
    rng = random.Random(seed)
    decoder = {
        p.key: slot(p, options, weight=10 ** rng.uniform(-2, 0)) for p in decoder_projections(spec)
    }
    return Measurement(decoder=decoder, head=slot(spec.head, head_options, weight=0.3))


def written_in_nats(path: Path, spec: ModelSpec, *, head: bool = True, seed: int = 0) -> Path:
    """Write such a measurement, with the head or without."""
    measurement = measured_in_nats(spec, seed=seed)
    slots = dict(measurement.decoder) | ({spec.head.key: measurement.head} if head else {})
    entries = {key: [item.to_json() for item in items] for key, items in slots.items()}
    content = {"measurement": entries, "last_module_idx": len(spec.sublayers) + 2}
    path.write_text(json.dumps(content))
    return path
