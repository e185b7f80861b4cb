"""The stages of every pipeline in order, and the loop that runs them; needs no Prefect."""

from collections.abc import Callable, Collection
from typing import Any

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.runtime.progress import Tick, report
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.inference.compose.stage import COMPOSE
from exl2flow.inference.validate.stage import VALIDATE
from exl2flow.quant.allocate.stage import ALLOCATE
from exl2flow.quant.compile.refined import COMPILE_REFINED
from exl2flow.quant.compile.stage import COMPILE
from exl2flow.quant.judge.stage import JUDGE
from exl2flow.quant.measure.stage import MEASURE
from exl2flow.quant.mtp.stage import MTP
from exl2flow.quant.quantize.stage import QUANTIZE
from exl2flow.quant.refine.stage import REFINE
from exl2flow.quant.refine.tuned import TUNE_REFINED
from exl2flow.quant.sensitivity.stage import SENSITIVITY
from exl2flow.quant.tokenize.stage import TOKENIZE
from exl2flow.quant.tune.stage import TUNE

STAGES: tuple[Stage[ConversionConfig], ...] = (
    COMPOSE,
    TOKENIZE,
    SENSITIVITY,
    MEASURE,
    ALLOCATE,
    QUANTIZE,
    TUNE,
    MTP,
    COMPILE,
    VALIDATE,
)
SHARED_STAGES: tuple[Stage[Any], ...] = tuple(stage for stage in STAGES if stage.is_shared)
MEASURE_STAGES = SHARED_STAGES[: SHARED_STAGES.index(MEASURE) + 1]
REFINE_STAGES: tuple[Stage[RefinementConfig], ...] = (
    COMPOSE,
    TOKENIZE,
    SENSITIVITY,
    REFINE,
    TUNE_REFINED,
    JUDGE,
    COMPILE_REFINED,
    VALIDATE,
)
ALL_STAGES: tuple[Stage[Any], ...] = (*STAGES, *REFINE_STAGES)  # of every kind of run


def run_in_order(
    pipeline: Pipeline,
    run: Callable[[str], object] | None = None,
    *,
    done: Collection[str] = (),
) -> None:
    """Run the stages of a pipeline in order, reporting those that are complete as cached.

    No other run writes into the output meanwhile.

    Args:
        pipeline: the stages.
        run: runs the stage of a name; None runs it directly, with the current progress sink.
        done: names of stages to skip, because they ran before.
    """
    with pipeline.alone():
        for name in pipeline.stages:
            if name in done:
                continue
            if pipeline.is_complete(name):
                report(Tick(stage=name, done=1, total=1, detail="cached"))
            if run is None:
                pipeline.run(name, progress=report)
            else:
                run(name)
