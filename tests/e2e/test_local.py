"""Conversions without Prefect."""

import os
import re
import subprocess
import sys
from pathlib import Path

from conversions import small_config
from tiny import make_tiny

CODE = """
import logging
import sys
from exl2flow.core.options.config import ConversionConfig
from exl2flow.flows import run_locally
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
ticks = []
config = ConversionConfig.model_validate_json(sys.stdin.read())
made = run_locally(config, progress=ticks.append)
print(made)
first, last = ["tokenize", "sensitivity", "measure"], ["quantize", "compile", "validate"]
assert list(made.stages) == [*first, "allocate", *last]
assert (made.out / "model.safetensors").is_file()
assert {tick.stage for tick in ticks} == set(made.stages)
assert not any(name.partition(".")[0] == "prefect" for name in sys.modules)
"""


def test_stages_run_without_importing_prefect(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "tiny", num_hidden_layers=1)
    config = small_config(source, tmp_path / "out", bpw=4.0)

    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=config.model_dump_json(),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )

    assert "stage 3 of 7, measure, 0 of 3" in done.stdout
    figures = r"`.*/out`: .* kB, .* bits per weight, KL divergence .* nats, perplexity .*"
    assert re.fullmatch(figures, done.stdout.splitlines()[-1])
