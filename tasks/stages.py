"""The stages of a conversion, in order, without importing Prefect."""

from exl2flow.core.stage import Stage
from exl2flow.inference.compose.stage import COMPOSE
from exl2flow.inference.validate.stage import VALIDATE
from exl2flow.quant.allocate.stage import ALLOCATE
from exl2flow.quant.compile.refined import RECOMPILE
from exl2flow.quant.compile.stage import COMPILE
from exl2flow.quant.judge.stage import JUDGE
from exl2flow.quant.measure.stage import MEASURE
from exl2flow.quant.quantize.stage import QUANTIZE
from exl2flow.quant.refine.stage import REFINE
from exl2flow.quant.sensitivity.stage import SENSITIVITY
from exl2flow.quant.tokenize.stage import TOKENIZE
from exl2flow.quant.tune.stage import TUNE

__all__ = ["MEASURE_STAGES", "REFINE_STAGES", "STAGES"]

MEASURE_STAGES: tuple[Stage, ...] = (COMPOSE, TOKENIZE, SENSITIVITY, MEASURE)
STAGES: tuple[Stage, ...] = (*MEASURE_STAGES, ALLOCATE, QUANTIZE, TUNE, COMPILE, VALIDATE)
REFINE_STAGES: tuple[Stage, ...] = (
    *(COMPOSE, TOKENIZE, SENSITIVITY, REFINE, JUDGE, RECOMPILE, VALIDATE),
)
