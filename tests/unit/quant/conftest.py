"""A finished conversion that several tests look into."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from conversions import small_config
from stage_runs import run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.config import ConversionConfig
from exl2flow.core.stage import Pipeline
from exl2flow.model import ModelSpec, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A conversion up to the compiled model; not to be changed."""

    config: ConversionConfig
    pipeline: Pipeline
    spec: ModelSpec

    def path(self, stage: str) -> Path:
        """Return the folder of a stage."""
        return self.pipeline.path(stage)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A tiny Llama at 4 bits per weight; the quantizing rows differ from the measuring ones."""
    root = tmp_path_factory.mktemp("converted")
    source = make_tiny("llama", root / "model")
    calibration = {
        "text": text_parquet(root / "text.parquet"),
        "rows": 5,
        "row_tokens": 96,
        "measure_rows": 3,
        "measure_row_tokens": 64,
    }
    config = small_config(source, root / "out", bpw=4.0, calibration=calibration)
    pipeline = run_until(config, "compile")
    return Converted(config=config, pipeline=pipeline, spec=resolve(source))
