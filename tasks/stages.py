"""The stages of a conversion, in order; known here without Prefect."""

from exl2flow.core.stage import Stage
from exl2flow.inference.compose import COMPOSE
from exl2flow.inference.validate import VALIDATE
from exl2flow.quant.compile import COMPILE
from exl2flow.quant.judge import JUDGE
from exl2flow.quant.measure import MEASURE
from exl2flow.quant.quantize import QUANTIZE
from exl2flow.quant.recompile import RECOMPILE
from exl2flow.quant.rounds import ALLOCATE
from exl2flow.quant.sensitivity import SENSITIVITY
from exl2flow.quant.tokens import TOKENIZE
from exl2flow.quant.tune import TUNE
from exl2flow.quant.upgrade import REFINE

__all__ = ["MEASURE_STAGES", "REFINE_STAGES", "STAGES"]

MEASURE_STAGES: tuple[Stage, ...] = (COMPOSE, TOKENIZE, SENSITIVITY, MEASURE)
STAGES: tuple[Stage, ...] = (*MEASURE_STAGES, ALLOCATE, QUANTIZE, TUNE, COMPILE, VALIDATE)
REFINE_STAGES: tuple[Stage, ...] = (
    *(COMPOSE, TOKENIZE, SENSITIVITY, REFINE, JUDGE, RECOMPILE, VALIDATE),
)
