"""Peak of main memory in each stage, beside the forecast, on layers shaped like a large model's.

    python benchmarks/host_memory.py [--shapes 7b 14b 24b] [--layers 2] [--device cuda]
        [--max-memory 24GB] [--rows N] [--quality standard] [--json FILE]

Each shape is converted in a process of its own, without Prefect, which another one watches: memory
is what is the process's own or shared with a device (`RssAnon` and `RssShmem` of it and its
children), so pages of files that are read do not count. The states are saved as often as possible,
because a whole model would save them at some time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from shapes import SHAPES, make_model

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import report
from exl2flow.core.store import store
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.devices import choose_allocator
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.plan import base_memory
from exl2flow.quant.forecast.preflight import preflight

PAUSE_SECONDS = 0.01
OWN = ("RssAnon", "RssShmem")
ALL = "VmRSS"  # where the kernel does not tell them apart


def main() -> None:
    """Convert each shape and print what its stages took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["7b", "14b", "24b"], choices=SHAPES)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-memory", help="limit for the GPU, such as 24GB")
    parser.add_argument("--rows", type=int, help="calibration rows, a sixth to measure; else all")
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--quality", default="standard")
    parser.add_argument("--json", type=Path, help="file for the figures in bytes")
    parser.add_argument("--convert", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        convert(ConversionConfig.model_validate(arguments.convert))
        return
    tokens, rows = arguments.row_tokens, arguments.rows
    few = {"row_tokens": tokens, "measure_row_tokens": tokens}
    few |= {"rows": rows, "measure_rows": max(1, rows // 6)} if rows else {}
    found = {}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            make_model(root / "source", shape, arguments.layers)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            options = {
                "source": str(root / "source"),
                "out": str(root / "out"),
                "work_root": str(root / "work"),
                "bpw": 4.0,
                "quality": arguments.quality,
                "device": arguments.device,
                "calibration": few,
                "max_memory": arguments.max_memory,
            }
            found[shape] = watched(options)
        limit = arguments.max_memory or "no limit"
        show(f"{shape}, {arguments.layers} layers, {limit}", found[shape])
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))


def convert(config: ConversionConfig) -> None:
    """Run all stages here; print a line of JSON at the start and at the end of each."""
    store.STATES_INTERVAL_SECONDS = store.STATES_LONGEST = 0
    choose_allocator()
    plan = preflight(config, STAGES, anew=True)
    pipeline, on_gpu = open_pipeline(config, STAGES), plan.card is not None
    for name in pipeline.stages:
        print(json.dumps({"stage": name}), flush=True)
        begun = time.monotonic()
        if on_gpu:
            torch.cuda.reset_peak_host_memory_stats()
        pipeline.run(name, progress=report)
        pinned = torch.cuda.host_memory_stats() if on_gpu else {}
        need = plan.needs.get(name)
        figures = {
            "forecast": base_memory(plan.card) + need.memory_bytes if need else None,
            "seconds": round(time.monotonic() - begun, 1),
            "pinned": pinned.get("allocated_bytes.peak", 0),
            "pinned in use": pinned.get("active_bytes.peak", 0),
        }
        print(json.dumps({"stage": name, "figures": figures}), flush=True)


def watched(options: dict[str, object]) -> dict[str, dict[str, float]]:
    """Convert in a child process; return the figures and the peak of each stage."""
    command = [sys.executable, __file__, "--convert", json.dumps(options)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    stages: dict[str, dict[str, float]] = {}
    ended, now = threading.Event(), "start"

    def watch() -> None:
        while not ended.wait(PAUSE_SECONDS):
            stage = stages.setdefault(now, {})
            for what, count in memory_of(child.pid).items():
                stage[what] = max(stage.get(what, 0), count)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for line in child.stdout:
            told = json.loads(line)
            now = told["stage"]
            stages.setdefault(now, {}).update(told.get("figures", {}))
    finally:
        ended.set()
        watcher.join()
    if child.wait():
        sys.exit(f"the conversion failed with status {child.returncode}")
    return stages


def memory_of(pid: int) -> dict[str, int]:
    """Return the memory of a process and of its children in bytes: its own, and all of it."""
    statuses = [fields for each in _family(pid) if (fields := _status(each))]
    own = sum(f.get(name, 0) for f in statuses for name in OWN)
    whole = sum(f.get(ALL, 0) for f in statuses)
    return {"peak": own or whole, "with files": whole, "machine": _machine()}


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return


def _status(pid: int) -> dict[str, int]:
    """Return the sizes in a process's status, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(count) * 1024 for name, count, _ in fields}


def _machine() -> int:
    """Return how much of the machine's memory is in use and cannot be freed."""
    return psutil.virtual_memory().total - psutil.virtual_memory().available


def show(title: str, stages: dict[str, dict[str, float]]) -> None:
    """Print a Markdown table in GB."""
    columns = ("peak", "forecast", "pinned", "pinned in use", "with files", "machine", "seconds")
    print(f"\n{title}\n\n| stage | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    for stage, figures in stages.items():
        sizes = [f"{(figures.get(name) or 0) / 1e9:.2f}" for name in columns[:-1]]
        print(f"| {stage} | {' | '.join(sizes)} | {figures.get('seconds', 0)} |", flush=True)


if __name__ == "__main__":
    main()
