"""Backward passes of tiny models, without the stages that use their factors."""

from pathlib import Path
from typing import Literal

import torch
from conversions import small_config
from decoders import build_decoder
from stage_runs import text_parquet
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import Progress, silent
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import TensorFiles, resolve
from exl2flow.model.layers.decoder import Decoder
from exl2flow.quant.sensitivity.fisher import Factors
from exl2flow.quant.sensitivity.stage import SENSITIVITY, FactorFiles
from exl2flow.quant.tokenize.stage import TOKENIZE


def configuration(
    family: str, folder: Path, *, block: int = 0, **shape: object
) -> ConversionConfig:
    """Return a conversion of a tiny model with three rows of 64 tokens."""
    text = text_parquet(folder / "text.parquet")
    return small_config(
        make_tiny(family, folder / "model", **shape),
        folder / "out",
        calibration={"text": str(text), "rows": 3, "row_tokens": 64, "measure_rows": 1},
        sensitivity={"rows": 2, "block": block},
    )


def pipeline_in(config: ConversionConfig, work_root: Path) -> Pipeline:
    """Return the two stages, in a work root of their own."""
    moved = config.model_copy(update={"work_root": work_root})
    return Pipeline(moved, (TOKENIZE, SENSITIVITY), device="cpu")


def run_all(pipeline: Pipeline, progress: Progress = silent) -> Pipeline:
    """Run both stages and return them."""
    for name in pipeline.stages:
        pipeline.run(name, progress=progress)
    return pipeline


def whole_decoder(config: ConversionConfig) -> Decoder:
    """Return the model with all its sublayers in memory."""
    return build_decoder(
        resolve(config.source), TensorFiles(config.source), dtype=torch.float32, device="cpu"
    )


def read_factors(folder: Path, index: int | Literal["head"]) -> dict[str, Factors]:
    """Return projection → factors of a sublayer or of the head, on the CPU."""
    return FactorFiles(folder, "cpu").read(index)
