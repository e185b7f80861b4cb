"""Time and GPU memory of each stage, on layers shaped like a large model's, or on a model.

    python benchmarks/layers.py [--shape 7b | --model DIR] [--layers 2] [--quality standard]
        [--device cuda] [--until validate] [--profile measure] [--rows N] [--max-memory 24GB]

Builds a model of random weights in a temporary folder unless one is given, runs each stage without
Prefect, and prints seconds per stage, seconds per layer (the median, from the end of the previous
layer to its own, results stored), and peak GPU memory next to the forecast of `--dry-run`.
`--profile` adds the kernels that took longest in a stage.
"""

import argparse
import logging
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from shapes import SHAPES, make_model

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import report
from exl2flow.core.store.need import Need
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.devices import choose_allocator
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.preflight import preflight

LAYER = re.compile(r"model\.layers\.\d+")


class LayerTimes(logging.Handler):
    """Records when the log reports a finished sublayer."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if match := LAYER.search(record.getMessage()):
            self.ends[match[0]] = record.created

    def median(self) -> float:
        """Return the median seconds per layer, without the first."""
        seconds = [after - before for before, after in pairwise(self.ends.values())]
        return statistics.median(seconds) if seconds else 0.0


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """Print the kernels that took longest."""
    if not wanted:
        yield
        return
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        yield
        torch.cuda.synchronize()
    averages = profile.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))


def run(config: ConversionConfig, last: str, profile: list[str]) -> None:
    """Run the stages and print a line for each."""
    forecast = preflight(config, STAGES, anew=True).needs
    pipeline = open_pipeline(config, STAGES)
    on_gpu = config.device == "cuda"
    log = logging.getLogger("exl2flow")
    log.setLevel(logging.INFO)
    print("| stage | seconds | per layer | peak GB | forecast |")
    print("|---|---|---|---|---|")
    all_seconds = 0.0
    for name in pipeline.stages:
        times = LayerTimes()
        log.addHandler(times)
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begun = time.monotonic()
        with profiled(name in profile):
            pipeline.run(name, progress=report)
        seconds = time.monotonic() - begun
        log.removeHandler(times)
        peak = torch.cuda.max_memory_reserved() / 1e9 if on_gpu else 0.0
        all_seconds += seconds
        need = forecast.get(name, Need()).gpu_memory_bytes
        print(
            f"| {name} | {seconds:.2f} | {times.median():.2f} | {peak:.1f} | {need / 1e9:.1f} |",
            flush=True,
        )
        if name == last:
            break
    print(f"| all | {all_seconds:.2f} | | | |")


def main() -> None:
    """Build the model and run the stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--model", type=Path, help="a model folder instead of random weights")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--quality", nargs="+", default=["standard"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--until", default="validate", help="the last stage to run")
    parser.add_argument("--profile", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--max-memory", help="limit for the GPU, such as 24GB")
    parser.add_argument("--rows", type=int, help="calibration rows, a sixth to measure; else all")
    arguments = parser.parse_args()
    choose_allocator()  # before the model is created
    logging.getLogger("exl2flow.core.runtime.background").addHandler(logging.StreamHandler())
    rows = arguments.rows
    few = {"rows": rows, "measure_rows": max(1, rows // 6)} if rows else {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = arguments.model or root / "source"
        if not arguments.model:
            make_model(source, arguments.shape, arguments.layers)
        for quality in arguments.quality:
            config = ConversionConfig(
                source=source,
                out=root / quality,
                work_root=root / f"work-{quality}",
                bpw=arguments.bpw,
                quality=quality,
                device=arguments.device,
                calibration=few,
                max_memory=arguments.max_memory,
            )
            what = arguments.model or f"{arguments.shape}, {arguments.layers} layers"
            print(f"\n{what}, {quality}, torch {torch.__version__}\n")
            run(config, arguments.until, arguments.profile)


if __name__ == "__main__":
    main()
