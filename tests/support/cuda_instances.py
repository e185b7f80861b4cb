"""The CUDA sources, and the instances of their templates that are launched."""

from itertools import product

from caches import GPU_FORMATS

from exl2flow.kernels.cuda.cache import LAUNCH_TOKENS, SET, TOGETHER_WIDTH, WIDTHS
from exl2flow.kernels.cuda.delta import FEW_TOKENS
from exl2flow.kernels.interface.cache_formats import CACHE_FORMATS, STEP_TOKENS
from exl2flow.kernels.plans.batched import EXCHANGED_ROWS
from exl2flow.kernels.plans.product import BATCHED_ROWS, ROWS
from exl2flow.kernels.plans.sources import FOLDER

SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
FORMATS = {(CACHE_FORMATS[name].keys.name, CACHE_FORMATS[name].values.name) for name in GPU_FORMATS}
SOME = [("HALF", "HALF"), ("ROTATED_8", "ROTATED_4")]  # between them all ways to read an element
CODES = [("ROTATED_4", "ROTATED_4"), ("ROTATED_8", "ROTATED_8"), ("ROTATED_6", "ROTATED_4")]
SHAPES = [(1, SET), (LAUNCH_TOKENS, SET), (LAUNCH_TOKENS, 2 * SET)]  # tokens and columns
GPTQ = ("false", "true")
EXCHANGES = ("", ", true")
INSTANCES = {
    "attention.cu": [
        f"attend<{width}, {keys}, {values}, {tokens}, {columns}, 1>"
        for width, (keys, values), (tokens, columns) in product(WIDTHS, sorted(FORMATS), SHAPES)
        if (columns == SET or width < WIDTHS[-1]) and (tokens == 1 or (keys, values) in SOME)
    ]
    + [
        f"attend<{width}, {keys}, {values}, 1, {columns}, {together}>"
        for width, (keys, values) in product(WIDTHS[:-1], CODES)
        for columns, together in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4), (8, 2))
        if width == TOGETHER_WIDTH or (together == 1 and keys == "ROTATED_4")
    ],
    "delta.cu": [f"delta_step<{tokens}>" for tokens in (FEW_TOKENS, STEP_TOKENS)],
    "product.cu": [
        f"product<{rows}, {gptq}{more}>" for more in EXCHANGES for rows in ROWS for gptq in GPTQ
    ],
    "batched.cu": [
        f"batched<{rows}, {gptq}{more}>"
        for more in EXCHANGES
        for rows in BATCHED_ROWS
        for gptq in GPTQ
        if not more or rows <= EXCHANGED_ROWS
    ],
}
