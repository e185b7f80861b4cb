"""Options whose default depends on what the device holds: text that it writes, trained codes."""

import logging
import math
from typing import Any, TypeVar

from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.config import RunOptions, TrainedOptions, TuneOptions
from exl2flow.core.runtime.memory import available_memory, total_memory
from exl2flow.kernels import resolve_device
from exl2flow.model import Composition, resolve
from exl2flow.pipeline.run import Run
from exl2flow.quant.forecast.plan import base_memory, begun_pipeline
from exl2flow.quant.tune.distill import STEP_TOKENS
from exl2flow.quant.tune.stage import tune_memory
from exl2flow.quant.tune.windows import windows
from exl2flow.quant.walk.needs import FLOAT, HALF, Card

Options = TypeVar("Options", bound=RunOptions)

log = logging.getLogger(__name__)

TRAINING_ROWS = 988  # two million tokens
ROOM = 0.9  # of memory, for a model that writes or is trained
CPU_OPERATIONS = 4e12  # of writing on a CPU at most, about ten minutes, and in `best` alone


def settled(run: Run, config: Options) -> Options:
    """Return the configuration with all such options settled."""
    return with_text(run, with_rows(with_codes(config)))


def with_codes(config: Options) -> Options:
    """Return a configuration that trains end to end only what memory suffices for.

    Without codes, training needs no more text and steps than on a CPU. Where the whole model does
    not fit, it is left out, with a warning: sublayers are trained one by one anyway.
    """
    if not isinstance(config, TrainedOptions) or not config.tune.steps:
        return config
    try:
        found = [(_training(config, tune), tune) for tune in _possible(config)]
    except (Exl2FlowError, OSError):  # the checks to come say what is wrong
        return config
    for (needed, room), tune in found:
        if needed < room:
            return config.model_copy(update={"tune": tune})
    log.warning(
        "remedy=no training end to end, which needs %.1f GB of the device's memory; %.1f GB may "
        "be used",
        needed / 1e9,
        room / 1e9,
    )
    tune = config.tune.model_copy(update={"steps": 0})
    return config.model_copy(update={"tune": tune})


def _possible(config: TrainedOptions) -> list[TuneOptions]:
    """Return the ways to train, the best first: all of the model, without codes, layers together.

    Windows of layers are as few as possible, and about as long as each other. Those of one layer
    bring nothing that training its sublayers has not (docs/concepts/quality.md 7).
    """
    options, spec = config.tune, resolve(config.source)
    layers = len(windows(spec, 1))
    lengths = dict.fromkeys(math.ceil(layers / count) for count in range(2, layers))
    plain = {"code_rate": 0.0, "rows": 0, "tokens": options.tokens or STEP_TOKENS["cpu"]}
    parts = [{"layers": length, "rows": 0} for length in lengths] if options.layers is None else []
    changes: list[dict[str, Any]] = [{}, plain, *parts]
    return [options.model_copy(update=change) for change in changes]


def _training(config: TrainedOptions, tune: TuneOptions) -> tuple[int, float]:
    """Return how many bytes training end to end needs, and how many it may use."""
    device = resolve_device(config.device)
    memory = total_memory(device)
    usable = min(ROOM * memory, config.max_memory or memory)
    card = int(usable) if device.type == "cuda" else None
    tokens = config.calibration.row_tokens
    return tune_memory(resolve(config.source), tune, tokens, card), usable


def with_rows(config: Options) -> Options:
    """Return a configuration that says how many rows the model writes to be trained on."""
    if (
        not isinstance(config, TrainedOptions)
        or not config.is_tuned
        or config.tune.rows is not None
    ):
        return config
    try:
        on_gpu = resolve_device(config.device).type == "cuda"
        rows = TRAINING_ROWS if on_gpu and _fits(_with(config, "self")) else 0
    except (Exl2FlowError, OSError):  # the checks to come say what is wrong
        return config
    tune = config.tune.model_copy(update={"rows": rows})
    return config.model_copy(update={"tune": tune})


def with_text(run: Run, config: Options) -> Options:
    """Return a configuration whose text is not `auto`: `self` if the model can write its rows.

    What a work directory was begun with goes on, so that nothing is made twice.
    """
    if config.calibration.text != "auto":
        return config
    written, standard = (_with(config, text) for text in ("self", "standard"))
    try:
        if _is_begun(run, written):
            return written
        return written if not _is_begun(run, standard) and _fits(written) else standard
    except (Exl2FlowError, OSError):  # the checks to come say what is wrong
        return standard


def _with(config: Options, text: str) -> Options:
    calibration = config.calibration.model_copy(update={"text": text})
    return config.model_copy(update={"calibration": calibration})


def _is_begun(run: Run, config: RunOptions) -> bool:
    """Return whether an earlier run with these options was stopped, or has finished."""
    for model in config.models().values():
        pipeline = begun_pipeline(model, run.stages)
        if pipeline is None:
            return False
        begun = [name for name in pipeline.stages if pipeline.path(name).exists()]
        if begun and (
            len(begun) == len(pipeline.stages) or not all(map(pipeline.is_complete, begun))
        ):
            return True
    return False


def _fits(config: RunOptions) -> bool:
    """Return whether the device holds the whole model, and writes in little of the run's time."""
    device, spec = resolve_device(config.device), resolve(config.source)
    if device.type == "cuda":
        memory = Card.of(device, config.max_memory).memory
        plan = Composition.of_run(spec, config, memory)
        return HALF * plan.elements < ROOM * memory
    plan, free = Composition.of_run(spec, config, None), available_memory()
    has_room = free is None or base_memory(None) + FLOAT * plan.elements < ROOM * free
    has_time = 2 * plan.weights * plan.rows * plan.tokens < CPU_OPERATIONS
    return has_room and has_time and config.is_tuned
