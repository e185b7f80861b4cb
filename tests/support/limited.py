"""Convert a model with 2 GB of GPU memory; print the bytes that each stage reserved as JSON.

python tests/support/limited.py SOURCE OUT
"""

import json
import sys
from pathlib import Path

import torch
from conversions import small_config

from exl2flow.core.runtime.progress import silent
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import STAGES


def main(source: str, out: str) -> None:
    config = small_config(
        Path(source),
        Path(out),
        device="cuda",
        quality="standard",
        max_memory="2GB",
        calibration={"rows": 24, "row_tokens": 2048, "measure_rows": 8, "measure_row_tokens": 2048},
    )
    pipeline = open_pipeline(config, STAGES)
    reserved = {}
    for name in pipeline.stages:
        pipeline.run(name, progress=silent)
        reserved[name] = torch.cuda.max_memory_reserved()
    print(json.dumps(reserved))


if __name__ == "__main__":
    main(*sys.argv[1:])
