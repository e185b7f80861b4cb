"""Run the tests whose results depend on the processor, as on others.

Sums depend on how many elements a vector register holds and on how many threads share a sum.
`ATEN_CPU_CAPABILITY` chooses torch's kernels (`default` has no vectors beyond those of any x86-64),
`EXL2FLOW_TEST_THREADS` its threads (see `conftest.py`). Kernels that this processor cannot run are
left out; MKL, which multiplies matrices, chooses for itself.
`--quick` leaves out the stages and long texts. With `--setting default --threads 1`, as CI runs it,
it takes 60 s on two idle cores; all tests in all nine settings take 20 minutes.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple

os.environ.pop("ATEN_CPU_CAPABILITY", None)  # before torch reads it
import torch

ROOT = Path(__file__).parents[2]
SETTINGS = ("default", "avx2", "avx512")
THREADS = (1, 2, 4)
MARKS = "not slow and not gpu and not multigpu and not network"
# what compares results of torch: kernels, models, caches, texts, samples, factors, roundings
QUICK = (
    "golden/test_exl2.py",
    "property/test_descent.py",
    "property/test_packing.py",
    "unit/kernels/reference",
    "unit/kernels/interface/test_packed.py",
    *(f"unit/model/layers/test_{name}.py" for name in ("attention", "blocks", "decoder")),
    *(f"unit/model/layers/test_{name}.py" for name in ("linear", "norms", "positions")),
    *(f"unit/model/layers/test_{name}.py" for name in ("rope", "sublayers")),
    "unit/model/config/test_families.py",
    "unit/engine/cache/test_paged.py",
    "unit/inference/scoring/test_evaluate.py",
    *(f"unit/engine/sampling/test_{name}.py" for name in ("sampling", "sampling_steps")),
    *(f"unit/engine/generate/test_{name}.py" for name in ("generator", "hidden", "device_slots")),
    "unit/engine/adapters/test_slots.py",
    "unit/inference/bench/test_batch.py",
    *(f"unit/quant/rounding/test_{name}.py" for name in ("descent", "error_feedback", "hessian")),
    "unit/quant/training/test_trainable.py",
)
# the stages that quantize a model, and texts of many steps
LONG = (
    "unit/compat/test_loading.py",
    "unit/compat/test_loops.py",
    "unit/model/layers/test_parity.py",
    "unit/quant/sensitivity",
    "unit/engine/generate/test_drafts.py",
    "unit/engine/test_shared.py",
    "unit/inference/validate",
    "property/test_sampling.py",
    *(f"unit/quant/allocate/test_{name}.py" for name in ("rounds", "stage", "trials")),
    *(f"unit/quant/{name}" for name in ("compile", "measure", "quantize", "refine")),
    "unit/quant/tune",
    "unit/quant/walk",
    "unit/quant/test_blocks.py",
)


class Result(NamedTuple):
    """What came of one setting; `output` is pytest's."""

    passed: int
    failed: int
    seconds: float
    output: str


def run(setting: str, threads: int, files: Iterable[str], options: list[str]) -> Result:
    """Run the files with these kernels and so many threads."""
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": setting,
        "EXL2FLOW_TEST_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # more threads than cores do not wait for each other
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", MARKS, "-n", "2"]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "--dist", "loadfile", *options, *(f"tests/{path}" for path in files)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    summary = done.stdout.strip().rpartition("\n")[2]
    passed, *others = (
        sum(int(number) for number in re.findall(rf"(\d+) {outcome}", summary))
        for outcome in ("passed", "failed", "error")
    )
    failed = max(sum(others), int(done.returncode != 0))  # as if none ran
    return Result(passed, failed, time.monotonic() - begin, done.stdout)


def runnable() -> tuple[str, ...]:
    """Return the settings up to the best one of this processor; `default` if it is not a x86-64."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    return SETTINGS[: SETTINGS.index(best) + 1] if best in SETTINGS else SETTINGS[:1]


def main() -> int:
    parser = argparse.ArgumentParser(description="run numeric tests as on other processors")
    parser.add_argument("--setting", choices=runnable(), help="only these kernels")
    parser.add_argument("--threads", type=int, choices=THREADS, help="only so many threads")
    parser.add_argument("--quick", action="store_true", help="only the tests of single parts")
    parser.add_argument("options", nargs="*", help="of pytest, after `--`")
    given = parser.parse_args()
    settings = (given.setting,) if given.setting else runnable()
    files = QUICK if given.quick else dict.fromkeys(QUICK + LONG)  # a folder names some files again
    counts = (given.threads,) if given.threads else THREADS
    print("| kernels | threads | passed | failed | seconds |\n|---|---|---|---|---|", flush=True)
    failures = []
    for threads, setting in product(counts, settings):
        found = run(setting, threads, files, given.options)
        figures = f"{found.passed} | {found.failed} | {found.seconds:.0f}"
        print(f"| {setting} | {threads} | {figures} |", flush=True)
        if found.failed:
            failures.append(f"{setting}, {threads} threads\n{found.output}")
    print(*failures, sep="\n", end="")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
