"""Finished conversions that several tests look into."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from conversions import small_config
from stage_runs import calibrated_on, run_until, text_parquet
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.stage import Pipeline
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


def convert(root: Path, **values: object) -> Converted:
    """Convert a tiny Llama to 4 bits; the quantizing rows differ from the measuring ones."""
    source = make_tiny("llama", root / "model")
    calibration = calibrated_on(text_parquet(root / "text.parquet"), (5, 96), (3, 64))
    config = small_config(source, root / "out", bpw=4.0, calibration=calibration, **values)
    pipeline = run_until(config, "compile")
    return Converted(config=config, pipeline=pipeline, spec=resolve(source))


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A conversion with the defaults (Fisher factors, rounds), but the targets are the weights."""
    root = tmp_path_factory.mktemp("converted")
    return convert(root, quality="standard", sensitivity={"rows": 2}, rounding={"correction": 0.0})


@pytest.fixture(scope="session")
def converted_as_exllamav2(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A conversion by the original algorithm: sublayers' errors, one multiplier per group."""
    return convert(tmp_path_factory.mktemp("as_exllamav2"), quality="exllamav2")
