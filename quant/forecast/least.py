"""The least GPU memory that each stage needs, whatever is reduced, and a bound that suffices.

The least counts tensors that the code holds at one moment and that have no remedy: states can wait
in main memory, rows can pass one at a time, a head can lie in main memory. With less a stage is
certain to run out of memory. The bound adds what may be needed besides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from exl2flow.core.options.config import RunOptions
from exl2flow.core.store.stage import Stage
from exl2flow.model import ModelSpec, ProjectionSpec, SublayerPart
from exl2flow.quant.forecast.needs import stage_needs
from exl2flow.quant.measure.candidates import candidates_for
from exl2flow.quant.sensitivity.fisher import factor_bytes
from exl2flow.quant.sensitivity.stage import (
    SENSITIVITY,
    factor_bytes_of,
    head_block,
    sublayer_bytes,
)
from exl2flow.quant.walk.needs import FLOAT, HALF, LIBRARIES, Card, hessian_elements
from exl2flow.quant.walk.pinned import is_tall
from exl2flow.quant.walk.working_memory import PASSING, stored_elements, working_bytes

CODE = 1  # bytes of a code


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """GPU memory of a stage in bytes; part: the sublayer or head with the greatest `least_bytes`.

    least_bytes: what the stage cannot do without; bound_bytes: what suffices.
    """

    stage: str
    part: str
    least_bytes: int
    bound_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A sublayer or the head; tall: names of the matrices that lie in main memory."""

    name: str
    projections: tuple[ProjectionSpec, ...]
    measured: tuple[SublayerPart, ...]
    tall: frozenset[str]
    factors: int  # bytes of the Fisher factors
    is_group: bool = False  # of experts, which are worked on one by one

    def weights(self) -> int:
        return sum(map(stored_elements, self.projections))

    def resident(self) -> int:
        """Return the weights that are on the GPU as fp32 too."""
        return sum(stored_elements(p) for p in self.projections if p.name not in self.tall)

    def factored(self) -> int:
        """Return the bytes of the Hessians' factors that exist together."""
        if not self.is_group:
            return self.hessians()
        return FLOAT * max(p.in_features for p in self.projections) ** 2

    def hessians(self) -> int:
        return FLOAT * hessian_elements(self.projections)


def stage_works(
    config: RunOptions, stages: Sequence[Stage[Any]], spec: ModelSpec, memory: int
) -> tuple[StageWork, ...]:
    """Return the works of a run's stages, in order; `compile` always needs less than others.

    Of a model that is split, loading it says whether it fits.

    Args:
        config: the run.
        stages: of the making of the model.
        spec: its model.
        memory: bytes of the GPU for tensors.
    """
    needs = stage_needs(config, stages, spec, Card(name="", memory=memory), packed=0)
    parts = list(_parts(config, spec, memory))
    works = []
    for stage, need in needs.items():
        if need.holds == "model":  # nothing reduces it
            part, least = "the whole model", need.gpu_memory_bytes
            bound = least
        elif need.holds == "sublayer":
            least, part = max((_least_bytes(stage, part), part.name) for part in parts)
            if stage == "sensitivity":
                bound = sublayer_bytes(config, spec) + LIBRARIES
            else:
                bound = working_bytes(spec, memory)
            bound = max(bound, least + PASSING)
        else:
            continue
        works.append(StageWork(stage=stage, part=part, least_bytes=least, bound_bytes=bound))
    return tuple(works)


def _parts(config: RunOptions, spec: ModelSpec, memory: int) -> Iterator[_Part]:
    """Yield one sublayer of each shape, and the head."""
    options = config.sensitivity
    block, has_factors = options.block, SENSITIVITY.enabled(config)
    distinct = {
        tuple((p.name, p.in_features, p.out_features) for p in sublayer.projections): sublayer
        for sublayer in reversed(spec.sublayers)
    }
    for sublayer in reversed(distinct.values()):
        projections = sublayer.projections
        yield _Part(
            name=sublayer.name,
            projections=projections,
            measured=sublayer.parts,
            tall=frozenset(p.name for p in projections if is_tall(stored_elements(p), memory)),
            factors=2 * factor_bytes_of(sublayer, block=block) if has_factors else 0,
            is_group=sublayer.group is not None,
        )
    head = (spec.head,)
    yield _Part(
        name=spec.head.key,
        projections=head,
        measured=(),
        tall=frozenset({spec.head.name}),  # if memory runs out
        factors=2 * factor_bytes(head, block=head_block(block)) if has_factors else 0,
    )


def _least_bytes(stage: str, part: _Part) -> int:
    """Return the least that a stage needs for a sublayer or the head.

    `sensitivity`: weights and sums of fp32. The others: weights of fp16, Hessians and Fisher
    factors, and beside them the greatest of these:
    - a Hessian that is being factored, and its factor;
    - `measure`: the factors of all Hessians (of experts one), and a matrix's codes and decoded
      values, with its target and errors if they are on the GPU; or, without Fisher factors, the
      codes of all candidates;
    - `quantize`: a factor, and a matrix's codes and errors.
    `quantize` also has all targets as fp32. Without Fisher factors `measure` only reads the head.
    """
    projections = part.projections
    if stage == "sensitivity":
        return FLOAT * sum(p.numel + p.in_features**2 for p in projections)
    if stage == "measure" and not part.factors and not part.measured:
        return HALF * part.weights()
    hessians = part.hessians()
    kept = HALF * part.weights() + hessians + part.factors
    largest = [2 * FLOAT * max(p.in_features for p in projections) ** 2]
    if stage == "measure" and part.factors:
        largest += [
            part.factored() + _rounded(p, part, CODE + HALF, 2 * FLOAT) for p in projections
        ]
    elif stage == "measure":
        largest += [part.factored() + CODE * _codes(measured) for measured in part.measured]
    elif stage == "quantize":
        kept += FLOAT * part.resident()
        largest += [FLOAT * p.in_features**2 + _rounded(p, part, CODE, FLOAT) for p in projections]
    return kept + max(largest)


def _rounded(projection: ProjectionSpec, part: _Part, always: int, resident: int) -> int:
    """Return the bytes of a matrix while it is rounded, from bytes per weight."""
    per_weight = always + (0 if projection.name in part.tall else resident)
    return per_weight * stored_elements(projection)


def _codes(measured: SublayerPart) -> int:
    """Return the weights of all matrices that the candidates of a part need."""
    sizes = {p.name: stored_elements(p) for p in measured.projections}
    pairs = {pair for candidate in candidates_for(measured) for pair in candidate.items()}
    return sum(sizes[name] for name, _ in pairs)
