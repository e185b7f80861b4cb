"""Whether a conversion fits GPUs of usual sizes, and the one at hand: yes, perhaps or no."""

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from exl2flow.core.errors import StoreError
from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.memory import limit_for, usable
from exl2flow.core.store.stage import Stage
from exl2flow.core.words import size
from exl2flow.model import ModelSpec
from exl2flow.model.layers.stream import rows_together
from exl2flow.quant.forecast.least import StageWork, stage_works
from exl2flow.quant.forecast.needs import stage_needs
from exl2flow.quant.walk.needs import Card
from exl2flow.quant.walk.pinned import is_tall
from exl2flow.quant.walk.source_model import most_rows, widest
from exl2flow.quant.walk.working_memory import stored_elements

log = logging.getLogger(__name__)

Stages = Sequence[Stage[Any]]
CARD_SIZES = (8, 12, 16, 24, 32, 80)  # GB, for which a plan has a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """Whether a conversion fits a GPU of `gigabytes`, 10⁹ bytes each.

    verdict: `yes`, `no`, or `perhaps` if a stage's bound exceeds the memory, but no stage's least;
    works: of the stages; reductions: what is done to need less memory, in words.
    """

    gigabytes: int
    verdict: str
    works: tuple[StageWork, ...]
    reductions: tuple[str, ...]

    @property
    def words(self) -> str:
        """The verdict, and what is reduced, or the least of the GPU that would be needed."""
        reason = ", ".join(self.reductions)
        if self.verdict == "no":
            most = _most(self.works)
            reason = f"{most.stage} needs {_gigabytes(most)} GB for {most.part}"
        return f"{self.verdict} ({reason})" if reason else self.verdict


def _most(works: Sequence[StageWork]) -> StageWork:
    return max(works, key=lambda work: work.least_bytes)


def _gigabytes(work: StageWork) -> str:
    """Return the least of a GPU that some work needs, CUDA's share included, rounded up."""
    return f"{math.ceil(limit_for(work.least_bytes) / 10**8) / 10:.1f}"


def in_words(fits: Sequence[GpuFit]) -> str:
    """Return the verdicts for people, sizes with the same one together."""
    groups = groupby(fits, key=lambda fit: fit.words)
    return "; ".join(
        f"{', '.join(str(fit.gigabytes) for fit in members)} GB {words}"
        for words, members in groups
    )


def gpu_fits(config: RunOptions, stages: Stages, spec: ModelSpec) -> tuple[GpuFit, ...]:
    """Return whether a conversion fits each of `CARD_SIZES`."""
    return tuple(fit_on(config, stages, spec, gigabytes) for gigabytes in CARD_SIZES)


def fit_on(config: RunOptions, stages: Stages, spec: ModelSpec, gigabytes: int) -> GpuFit:
    """Return whether a conversion fits a GPU, or a `--max-memory`, given in GB (10⁹ bytes)."""
    memory = usable(gigabytes * 10**9)
    works, verdict = stage_works(config, stages, spec, memory), "yes"
    if any(work.least_bytes > memory for work in works):
        verdict = "no"
    elif any(work.bound_bytes > memory for work in works):
        verdict = "perhaps"
    return GpuFit(
        gigabytes=gigabytes,
        verdict=verdict,
        works=works,
        reductions=tuple(_reductions(config, stages, spec, memory)),
    )


def _reductions(config: RunOptions, stages: Stages, spec: ModelSpec, memory: int) -> Iterator[str]:
    """Yield what is done to need less memory."""
    tokens = max(config.calibration.row_tokens, config.calibration.measure_row_tokens)
    usual = {(widest(sublayer.projections), most_rows(sublayer)) for sublayer in spec.sublayers}
    if any(rows_together(w, tokens, memory, most=most) < most for w, most in usual):
        yield "fewer rows at a time"
    needs = stage_needs(config, stages, spec, Card(name="", memory=memory), packed=0)
    main = ["states"] if any(need.pinned_bytes for need in needs.values()) else []
    if is_tall(stored_elements(spec.head), memory):
        main.append("head")
    if main:
        yield f"{' and '.join(main)} in main memory"


def check_gpu(
    config: RunOptions, stages: Stages, spec: ModelSpec, memory: int, left: Collection[str]
) -> None:
    """Check that a GPU has the least that some stages need; warn if it is below the bound.

    Args:
        config: the run.
        stages: of the making of the model.
        spec: its model.
        memory: bytes of the GPU for tensors.
        left: names of the stages that will run.

    Raises:
        StoreError: naming the stage, the sublayer, what it needs and what there is.
    """
    works = [work for work in stage_works(config, stages, spec, memory) if work.stage in left]
    if not works:
        return
    most = _most(works)
    if most.least_bytes > memory:
        raise StoreError(
            f"the stage `{most.stage}` needs at least {size(most.least_bytes)} of the GPU's memory "
            f"for the tensors of `{most.part}`, {size(memory)} may be used; use `--max-memory "
            f"{_gigabytes(most)}GB` or more, on a GPU that has it free, or `--device cpu`"
        )
    bound = max(work.bound_bytes for work in works)
    if bound > memory:
        log.warning(
            "the largest sublayer may need %s of the GPU's memory, %s may be used; if memory runs "
            "out, raise `--max-memory` and repeat the command: it continues from there",
            *map(size, (bound, memory)),
        )
