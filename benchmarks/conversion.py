"""Time and peak memory of a conversion, per stage, and of a second bitrate.

    python benchmarks/conversion.py --model DIR | --shape 7b --layers 32 [--bpw 4.0 3.0]
        [--device cpu] [-- MORE OPTIONS]

Runs `exl2flow convert` in child processes as a user would: with the temporary Prefect server and
an empty database, in an empty work root, with validation. Prints a Markdown table. Options after
`--` are passed on, such as `--no-prefect`. `--shape` creates a model of random weights.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from shapes import SHAPES, make_model

STAGES = (
    "tokenize",
    "sensitivity",
    "measure",
    "allocate",
    "quantize",
    "tune",
    "compile",
    "validate",
)


def convert(model: Path, root: Path, bpw: float, options: list[str]) -> dict[str, float | None]:
    """Convert once; return seconds by stage, the total and the peak resident memory in MB.

    The seconds of a stage that had already finished are None.
    """
    out = root / f"{bpw:g}bpw"
    command = [sys.executable, "-m", "exl2flow.flows.cli", "convert", str(model)]
    command += ["--out", str(out), "--bpw", str(bpw), "--work-root", str(root / "work")]
    env = {**os.environ, "PREFECT_HOME": str(root / "home")}
    begun, begun_wall = time.monotonic(), time.time()
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the conversion failed with status {status}")
    result: dict[str, float | None] = {"total": time.monotonic() - begun}
    result["peak MB"] = usage.ru_maxrss / 1024
    for path in (root / "work").glob("*/*/*/manifest.json"):
        manifest = json.loads(path.read_bytes())
        if path.stat().st_mtime >= begun_wall:
            result[manifest["stage"]] = manifest["seconds"]
        else:
            result.setdefault(manifest["stage"], None)
    return result


def main() -> None:
    """Convert to each bitrate in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--model", type=Path)
    given.add_argument("--shape", choices=SHAPES, help="shape of a model of random weights")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--bpw", type=float, nargs="+", default=[4.0, 3.0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("options", nargs="*", help="further options of `exl2flow convert`")
    arguments = parser.parse_args()
    options = ["--device", arguments.device, *arguments.options]
    name = (
        arguments.model.name if arguments.model else f"{arguments.shape}, {arguments.layers} layers"
    )
    print(f"{name}, {arguments.device}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    columns = ("total", *STAGES, "peak MB")
    print("| bpw | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "source"
        if arguments.shape:
            make_model(model, arguments.shape, arguments.layers)
        for bpw in arguments.bpw:
            found = convert(model, Path(folder), bpw, options)
            times = [found.get(name, 0.0) for name in columns]  # 0: the stage is not used
            cells = ["cached" if seconds is None else f"{seconds:.1f}" for seconds in times]
            print(f"| {bpw:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
