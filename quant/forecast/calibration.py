"""What calibration will do and need, and what can be known to be wrong with it beforehand."""

import torch

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import StoreError
from exl2flow.core.refine import RefinementConfig
from exl2flow.model import ChatTemplate, Composition, ModelSpec, Tokenizer
from exl2flow.quant.tokenize.dialogues import check_template
from exl2flow.quant.tokenize.stage import judging_rows

HALF, FULL = 2, 4  # bytes of a number on CUDA and on the CPU while the model writes rows


def check_calibration(
    config: ConversionConfig, spec: ModelSpec, device: torch.device | None
) -> None:
    """Ask that the model can make the rows that are to be of its own.

    Raises:
        ChatTemplateError: it has no chat template, or one that refuses a plain conversation.
        StoreError: it does not fit the GPU as a whole.
    """
    if config.calibration.text == "chat":
        check_template(ChatTemplate.load(spec.source_dir, Tokenizer.load(spec.source_dir)))
    if config.calibration.text == "self" and device is not None and device.type == "cuda":
        need = Composition.of(spec, config.calibration).elements * HALF
        free, _ = torch.cuda.mem_get_info()
        if need > free:
            raise StoreError(
                f"to write calibration rows, the whole model needs {need / 1e9:.1f} GB of the "
                f"GPU's memory, {free / 1e9:.1f} GB are free; use another calibration than `self`"
            )


def calibration_in_words(config: ConversionConfig, spec: ModelSpec) -> str:
    """Return how many rows of what there will be."""
    options = config.calibration
    text = f"{options.rows} rows x {options.row_tokens} tokens, "
    if isinstance(config, RefinementConfig):
        judging = judging_rows(config.held_out_rows, options.rows)
        text += f"of which {judging} are set aside to judge"
    else:
        text += f"measured on {options.measure_rows} x {options.measure_row_tokens}"
    count = options.special_rows(options.rows)
    match options.text:
        case "chat":
            return f"{text}; {count} of the rows are dialogues"
        case "self":
            plan = Composition.of(spec, options)
            return (
                f"{text}; the model first writes {plan.rows} of the rows itself, "
                f"{plan.at_once} at a time"
            )
        case _:
            return text


def composing_bytes(config: ConversionConfig, spec: ModelSpec, device: torch.device | None) -> int:
    """Forecast the main memory that the model takes while it writes rows; 0 if it writes none."""
    if config.calibration.text != "self" or (device is not None and device.type == "cuda"):
        return 0
    return Composition.of(spec, config.calibration).elements * FULL
