"""The supplement stage: candidates that only `--prefer speed` needs.

The measurement has no 2 bits in groups of 128. They are measured by themselves, so that the
preference can change without measuring everything again, and only for targets that need them.
"""

from dataclasses import replace
from pathlib import Path

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.kernels import tensor_cores
from exl2flow.model import ModelSpec
from exl2flow.quant.measure.candidates import FAST_GROUP, SUPPLEMENT_OPTIONS
from exl2flow.quant.measure.estimate import Estimating, read_slots
from exl2flow.quant.measure.measurement import (
    MEASUREMENT_FILE,
    Candidate,
    Measurement,
    read_measurement,
)
from exl2flow.quant.measure.stage import MEASURE, write_measurement
from exl2flow.quant.sensitivity.stage import FactorFiles
from exl2flow.quant.tokenize.stage import load_rows
from exl2flow.quant.walk.source_model import SourceModel
from exl2flow.quant.walk.walk import walk

BELOW = 4.0  # bits per weight; from here on, 2 bits lower the divergence by about 1 % at most


def is_needed(config: ConversionConfig) -> bool:
    """Return whether a conversion chooses among candidates of the supplement."""
    measures = config.measurement is None and config.sensitivity.kind == "fisher"
    is_low = config.bpw is None or config.bpw < BELOW
    return measures and is_low and config.allocate.prefer == "speed"


@tensor_cores()
@torch.inference_mode()
def supplement(run: StageRun) -> None:
    """Write a `measurement.json` of the supplement's candidates into the stage folder."""
    model = SourceModel.open(run.config, run.device)
    sublayers = model.spec.sublayers
    run.folder.manifest.total = len(sublayers)
    factors = FactorFiles(run.inputs["sensitivity"], model.device)
    work = Estimating(run.folder, factors, run.config.rounding, SUPPLEMENT_OPTIONS)
    walk(run, model, load_rows(run.inputs["tokenize"], "measure"), work, to_end=False)
    write_measurement(run, model.spec, read_slots(run.folder, map(work.file, sublayers)))


def read_candidates(
    config: ConversionConfig, spec: ModelSpec, path: Path, more: Path | None = None
) -> Measurement:
    """Read a measurement as far as the preference allows its candidates.

    Args:
        config: the conversion.
        spec: the model.
        path: the measurement.
        more: folder of the supplement, if there is one.

    Raises:
        ConfigError: it is not a measurement of the model; or speed is preferred, and a slot has no
            candidate with all its groups of `FAST_GROUP` rows.
    """
    measurement = read_measurement(path, spec)
    if config.allocate.prefer == "quality":
        return measurement
    added = read_measurement(more / MEASUREMENT_FILE, spec).decoder if more else {}
    decoder = {
        name: [
            result
            for result in (*results, *added.get(name, ()))
            if is_allowed(config, result.params)
        ]
        for name, results in measurement.decoder.items()
    }
    if lacking := [name for name, results in decoder.items() if not results]:
        raise ConfigError(
            f"`{path}`: `{lacking[0]}` lists no candidates in groups of {FAST_GROUP} rows; leave "
            "out `--prefer speed` or `--measurement`"
        )
    return replace(measurement, decoder=decoder)


def is_allowed(config: ConversionConfig, candidate: Candidate) -> bool:
    """Return whether the preference allows a candidate."""
    return config.allocate.prefer == "quality" or all(
        set(params.group_sizes) == {FAST_GROUP} for params in candidate.values()
    )


SUPPLEMENT = Stage(
    name="supplement",
    schema=1,
    inputs=("tokenize", "sensitivity"),
    options=MEASURE.options,
    run=supplement,
    enabled=is_needed,
    gpu_options=MEASURE.gpu_options,
)
