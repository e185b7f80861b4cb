"""Measurements in nats that need no measuring."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.exl2 import QuantParams
from exl2flow.quant.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS
from exl2flow.quant.measurement import CandidateResult, Measurement, projection_bits


def decoder_projections(spec: ModelSpec) -> list[ProjectionSpec]:
    """Return the projections of all sublayers, in order."""
    return [p for sublayer in spec.sublayers for p in sublayer.projections]


def slot(
    projection: ProjectionSpec, options: Sequence[QuantParams], *, weight: float
) -> list[CandidateResult]:
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
    return results


def measured_in_nats(
    spec: ModelSpec,
    *,
    options: Sequence[QuantParams] = PROJECTION_OPTIONS,
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
