"""The tune stage of `refine`: train the refined matrices to say what the reference says.

The old file has its norms, biases and embedding, which stay.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.store.stage import Stage, StageRun
from exl2flow.quant.refine.stored_model import StoredModel
from exl2flow.quant.tune.stage import needs, train, tune_gpu_options, tune_options
from exl2flow.quant.walk.source_model import SourceModel


def tune_refined(run: StageRun[RefinementConfig]) -> None:
    """Write replacements for the files of `refine`; see `train`."""
    source = SourceModel.open(run.config, run.device, gradients=True)
    own = StoredModel.open(run.config, run.device).with_reference()
    tune = run.config.tune.model_copy(update={"norm_rate": 0.0, "embedding_rate": 0.0})
    fixed = replace(run, config=run.config.model_copy(update={"tune": tune}))
    train(fixed, source, own, "refine")


def latest(inputs: Mapping[str, Path]) -> Path:
    """Return the folder of the matrices among a stage's inputs: trained ones if there are."""
    return inputs.get("tune", inputs["refine"])


TUNE_REFINED: Stage[RefinementConfig] = Stage(
    name="tune",
    schema=3,
    inputs=("compose", "tokenize", "sensitivity", "refine"),
    options=tune_options,
    gpu_options=tune_gpu_options,
    run=tune_refined,
    enabled=lambda config: config.is_tuned,
    needs=needs,
    removable=True,
    is_dealt=lambda config: True,
)
