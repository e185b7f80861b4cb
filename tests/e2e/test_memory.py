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
from exl2flow.cli.main import main

try:
    main()
finally:
    (peak,) = (s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
    print(peak.split()[1], file=sys.stderr)
"""
EXPERTS = """
from exl2flow.model.config import resolution
resolution.GROUP_WEIGHTS = {weights}
"""
HIDDEN, INTERMEDIATE = 256, 512
SHALLOW, DEEP = 8, 64
LAYER_BYTES = 4 * (3 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)  # fp32, half the key heads


FEW, MANY, STEP = 8, 64, 8  # experts of a layer, and of a step
EXPERT = 3 * 384 * 384  # weights


def peak_bytes(folder: Path, *, layers: int) -> int:
    """Convert and score a model of so many layers; return the peak memory."""
    shape = {"num_hidden_layers": layers, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    source = make_tiny("llama", folder / "model", dtype=torch.bfloat16, **shape)
    return peak_of(Conversion.inside(folder, source), PROGRAM)


def peak_of(conversion: Conversion, program: str) -> int:
    """Return the peak memory of a conversion; a sample would take the whole model where it fits."""
    ended = subprocess.run(
        [sys.executable, "-c", program, *conversion.arguments, "--sample-tokens", "0"],
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_peak_memory_of_a_conversion_does_not_grow_with_the_number_of_experts(
    tmp_path: Path,
) -> None:
    program = EXPERTS.format(weights=STEP * EXPERT) + PROGRAM
    peaks = []
    for experts in (FEW, MANY):
        folder = tmp_path / str(experts)
        source = make_tiny(
            "qwen2-moe",
            folder / "model",
            num_hidden_layers=1,
            hidden_size=384,
            moe_intermediate_size=384,
            shared_expert_intermediate_size=384,
            num_experts=experts,
            dtype=torch.bfloat16,
        )
        peaks.append(peak_of(Conversion.inside(folder, source), program))

    few, many = peaks
    assert many <= 1.1 * few, f"{many / 2**20:.0f} MiB after {few / 2**20:.0f} MiB"
    # kept experts would show: they are more than the tolerance
    assert 0.15 * few < 4 * (MANY - FEW) * EXPERT  # fp32
