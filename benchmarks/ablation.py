"""What each quality option gains: added to exllamav2's algorithm, and removed from presets.

    python benchmarks/ablation.py --model DIR [--text FILE] [--bpw 3.0 4.0] [--seeds 0 1 2]
        [--tables alone standard best] [--only WORD ...] [--set FIELD=VALUE ...] [--jobs N]
        [--device cpu] [--tune-device cuda]

Every line of `ablation.toml` is converted once per bitrate and seed, with a 6-bit head. A seed sets
those of calibration, sensitivity and tuning. `KL` is the mean divergence over seeds ± its standard
deviation; the ratio compares with the table's first line, seed by seed. Seconds cover all stages
but `validate`, at the first bitrate. Lines that do not change their preset are left out. A stopped
run continues when it is repeated.
"""

import argparse
import logging
import os
import re
import shutil
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from exl2flow.core.errors import ValidationFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.runtime.progress import report
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.model.files.measured import measurement_files
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.local import run_locally
from exl2flow.pipeline.stages import MEASURE_STAGES, STAGES

Changes = Mapping[str, object]
TABLES: Mapping[str, Mapping[str, Changes]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One conversion."""

    table: str
    line: str
    seed: int
    bpw: float

    @property
    def name(self) -> str:
        """The name of the output folder."""
        line = re.sub(r"[^a-z0-9.]+", "-", self.line.lower())
        return f"{self.table}-{line}-{self.bpw:g}bpw-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a conversion: divergence in nats, and the seconds it took."""

    kl: float
    seconds: float


def nested(changes: Changes) -> dict[str, Any]:
    """Nest dotted names into groups."""
    groups: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        group = groups
        for part in path:
            group = group.setdefault(part, {})
        group[last] = value
    return groups


def measurement_file(arguments: argparse.Namespace, seed: int) -> Path:
    """Return the path of the measurement by sublayer."""
    return Path(arguments.work) / f"measurement-seed{seed}.json"


def configure(arguments: argparse.Namespace, trial: Trial) -> ConversionConfig:
    """Return the configuration of a trial, with its own work root."""
    reference = next(iter(TABLES[trial.table].values()))
    seeds = {f"{group}.seed": trial.seed for group in ("calibration", "sensitivity", "tune")}
    values = {**reference, **TABLES[trial.table][trial.line], **seeds, **arguments.set}
    if "measurement" in values:
        values["measurement"] = measurement_file(arguments, trial.seed)
    scored = {
        "text": arguments.text,
        "rows": arguments.text_rows,
        "sample_tokens": 0,
        "warn_perplexity_ratio": 1e6,
        "fail_perplexity_ratio": 1e6,
    }
    return ConversionConfig(
        source=arguments.model,
        out=arguments.work / "models" / trial.name,
        work_root=arguments.work / "checkpoints" / trial.name,
        bpw=trial.bpw,
        device=arguments.device,
        **nested({**values, **{f"validate_options.{key}": v for key, v in scored.items()}}),
    )


def exchange(
    config: ConversionConfig, stages: Sequence[Stage[ConversionConfig]], *, give: bool
) -> Pipeline:
    """Link finished stages from the shared folder into the configuration's work root, or back."""
    pipeline = open_pipeline(config, stages)
    common = config.work_dir_root.parent / "common" / pipeline.work.root.name
    for name in set(pipeline.stages) & {stage.name for stage in MEASURE_STAGES}:
        path = pipeline.refs[name].path
        source, target = pipeline.work.root / path, common / path
        if not give:
            source, target = target, source
        if source.is_dir() and not target.exists():
            aside = target.with_name(f"{target.name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(source, aside, copy_function=os.link)
            aside.rename(target)
    return pipeline


def run_stage(config: ConversionConfig, name: str) -> Path:
    """Run one measuring stage on shared stages, share its result, and return its folder."""
    pipeline = exchange(config, MEASURE_STAGES, give=False)
    pipeline.run(name, progress=report)
    exchange(config, MEASURE_STAGES, give=True)
    return pipeline.path(name)


def convert(config: ConversionConfig, tune_device: str) -> Result:
    """Run a conversion on shared stages and return its validation result."""
    pipeline = exchange(config, STAGES, give=False)
    until_quantize = [stage.name for stage in STAGES].index("quantize") + 1
    try:
        run_locally(config, stages=STAGES[:until_quantize])
        run_locally(config.model_copy(update={"device": tune_device}))
    except ValidationFailed as error:  # a bad model is a result too
        print(f"{config.out.name}: {error}", file=sys.stderr)
    score = read_json(pipeline.path("validate") / "report.json")["score"]
    others = set(pipeline.stages) - {"validate"}
    seconds = [read_json(pipeline.path(name) / "manifest.json")["seconds"] for name in others]
    return Result(kl=score["kl_divergence"], seconds=sum(seconds))


def measure_all(
    pool: ProcessPoolExecutor, configs: Iterable[ConversionConfig], baselines: Sequence[Path]
) -> None:
    """Run every distinct measuring stage once, stage by stage.

    Args:
        pool: where to run them.
        configs: the configurations; a single bitrate suffices.
        baselines: files that receive the measurements of the first configurations.
    """
    pipelines = [open_pipeline(config, MEASURE_STAGES) for config in configs]
    for name in (stage.name for stage in MEASURE_STAGES):
        distinct: dict[str, ConversionConfig] = {}
        for pipeline in pipelines:
            if name in pipeline.refs:
                distinct.setdefault(pipeline.refs[name].fingerprint, pipeline.config)
        jobs = {key: pool.submit(run_stage, config, name) for key, config in distinct.items()}
        folders = {key: job.result() for key, job in jobs.items()}
        if name == "measure":
            for pipeline, file in zip(pipelines, baselines, strict=False):
                folder = folders[pipeline.refs[name].fingerprint]
                for written in measurement_files(folder / "measurement.json"):
                    shutil.copyfile(written, file.with_suffix(written.suffix))


def run_all(
    pool: ProcessPoolExecutor, trials: Sequence[Trial], arguments: argparse.Namespace
) -> dict[Trial, Result]:
    """Measure for all trials, convert, and return the results."""
    configs = {trial: configure(arguments, trial) for trial in trials}
    measured = {t: configs[t] for t in trials if t.bpw == arguments.bpw[0]}
    files: list[Path] = []
    if any(config.measurement for config in configs.values()):
        line, seeds = next(iter(TABLES["alone"])), arguments.seeds
        first = [Trial(table="alone", line=line, seed=s, bpw=arguments.bpw[0]) for s in seeds]
        measured = {trial: configure(arguments, trial) for trial in first} | measured
        files = [measurement_file(arguments, seed) for seed in seeds]
    measure_all(pool, measured.values(), files)
    device = arguments.tune_device or arguments.device
    jobs = {trial: pool.submit(convert, config, device) for trial, config in configs.items()}
    results = {}
    for trial, job in jobs.items():
        results[trial] = job.result()
        print(f"{trial.name}: {results[trial]}", file=sys.stderr, flush=True)
    return results


def lines_of(table: str, arguments: argparse.Namespace) -> list[str]:
    """Return the lines to convert: the requested ones that differ from the first."""

    def settings(line: str) -> dict[str, Any]:
        trial = Trial(table=table, line=line, seed=0, bpw=arguments.bpw[0])
        config = configure(arguments, trial)
        return config.model_dump(exclude={"out", "work_root"})

    first, *others = TABLES[table]
    reference = settings(first)
    asked = [line for line in others if not arguments.only or _any_in(arguments.only, line)]
    return [first, *(line for line in asked if settings(line) != reference)]


def _any_in(words: Iterable[str], line: str) -> bool:
    return any(word in line for word in words)


def cell(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def print_table(
    table: str, results: Mapping[Trial, Result], seeds: Sequence[int], bitrates: Sequence[float]
) -> None:
    """Print the lines of one table."""
    lines = list(dict.fromkeys(trial.line for trial in results if trial.table == table))
    columns = [table, *(f"{kind} at {b:g}" for b in bitrates for kind in ("KL", "ratio"))]
    print("\n| " + " | ".join([*columns, "seconds"]) + " |\n" + "|---" * (len(columns) + 1) + "|")
    for line in lines:
        cells = [line]
        for bpw in bitrates:
            found, reference = (
                [results[Trial(table=table, line=name, seed=seed, bpw=bpw)].kl for seed in seeds]
                for name in (line, lines[0])
            )
            ratios = [a / b for a, b in zip(found, reference, strict=True)]
            cells += [cell(found, 5), cell(ratios, 3)]
        first = [t for t in results if (t.table, t.line, t.bpw) == (table, line, bitrates[0])]
        cells.append(f"{statistics.mean(results[trial].seconds for trial in first):.0f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def pair(text: str) -> tuple[str, str]:
    """Divide FIELD=VALUE."""
    name, _, value = text.partition("=")
    return name, value


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="text to score on; else the held-out text")
    parser.add_argument("--text-rows", type=int, default=32, help="most rows of it")
    parser.add_argument("--bpw", type=float, nargs="+", default=[3.0, 4.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--only", nargs="+", help="lines with any of these words, and the first")
    parser.add_argument("--set", type=pair, nargs="+", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tune-device", help="device for tuning and scoring (default: --device)")
    parser.add_argument("--work", type=Path, default=Path("quality-work/ablation"))
    arguments = parser.parse_args()
    arguments.set = dict(arguments.set)
    return arguments


def main() -> None:
    """Measure, convert and print."""
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)) // arguments.jobs
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads))  # the processes inherit it
    trials = [
        Trial(table=table, line=line, seed=seed, bpw=bpw)
        for table in arguments.tables
        for line in lines_of(table, arguments)
        for bpw in arguments.bpw
        for seed in arguments.seeds
    ]
    pool = ProcessPoolExecutor(
        arguments.jobs,
        mp_context=get_context("spawn"),
        initializer=logging.disable,
        initargs=(logging.WARNING,),
    )
    try:
        results = run_all(pool, trials, arguments)
    finally:
        pool.shutdown(cancel_futures=True)
    for table in arguments.tables:
        print_table(table, results, arguments.seeds, arguments.bpw)


if __name__ == "__main__":
    main()
