"""Memory is that of one sublayer, however many there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crash import Conversion
from tiny import make_tiny

# The process reports its own peak: `ru_maxrss` of a child begins with the memory of its parent.
PROGRAM = """
import sys
from pathlib import Path
from exl2flow.flows.cli import main

try:
    main()
finally:
    (peak,) = (s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
    print(peak.split()[1], file=sys.stderr)
"""
HIDDEN, INTERMEDIATE = 256, 512
SHALLOW, DEEP = 8, 64
LAYER_BYTES = 4 * (3 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)  # fp32, half the key heads


def peak_bytes(folder: Path, *, layers: int) -> int:
    """Convert and score a model of so many layers; return the peak memory.

    A sample would take the whole model where it fits.
    """
    source = make_tiny(
        "llama",
        folder / "model",
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        dtype=torch.bfloat16,
    )
    conversion = Conversion.inside(folder, source)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *conversion.arguments, "--sample-tokens", "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert conversion.manifest("validate")["status"] == "complete"
    return int(ended.stderr.split()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_peak_memory_of_a_conversion_does_not_grow_with_depth(tmp_path: Path) -> None:
    shallow = peak_bytes(tmp_path / "shallow", layers=SHALLOW)
    deep = peak_bytes(tmp_path / "deep", layers=DEEP)

    assert deep <= 1.1 * shallow, f"{deep / 2**20:.0f} MiB after {shallow / 2**20:.0f} MiB"
    # kept layers would show: they are more than the tolerance
    assert 0.2 * shallow < (DEEP - SHALLOW) * LAYER_BYTES
