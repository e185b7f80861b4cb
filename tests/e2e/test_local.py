"""Conversions without Prefect."""

import os
import subprocess
import sys
from pathlib import Path

from conversions import small_config
from tiny import make_tiny

CODE = """
import sys
from exl2flow.core.options.config import ConversionConfig
from exl2flow.flows import run_locally
made = run_locally(ConversionConfig.model_validate_json(sys.stdin.read()))
first, last = ["tokenize", "sensitivity", "measure"], ["quantize", "compile", "validate"]
assert list(made.stages) == [*first, "allocate", *last]
assert (made.out / "model.safetensors").is_file()
assert not any(name.partition(".")[0] == "prefect" for name in sys.modules)
"""


def test_stages_run_without_importing_prefect(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "tiny", num_hidden_layers=1)
    config = small_config(source, tmp_path / "out", bpw=4.0)

    subprocess.run(
        [sys.executable, "-c", CODE],
        input=config.model_dump_json().encode(),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
