"""Results of a sweep: `sweep.json`, `report.html`, and one error for all failed bitrates."""

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from exl2flow.core.errors import ConfigError, Exl2FlowError, Interrupted, SweepFailed
from exl2flow.core.installing import install
from exl2flow.core.options.base import MEASUREMENT_FILE
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.naming import without_credentials
from exl2flow.core.options.sweep import REPORT_PAGE, SWEEP_FILE, SweepConfig
from exl2flow.core.reports import Score
from exl2flow.core.runtime.device_locks import visible_gpus
from exl2flow.core.store.files import read_json, write_json, write_text
from exl2flow.core.store.stage import Pipeline
from exl2flow.core.store.store import versions
from exl2flow.inference.report.comparison import (
    check_bitrates,
    compared,
    differences,
    known_score,
)
from exl2flow.inference.report.page import write_up
from exl2flow.inference.validate.stage import REPORT_FILE
from exl2flow.pipeline.conversion import in_a_line, open_pipeline
from exl2flow.pipeline.hub.publish import Published
from exl2flow.pipeline.stages import STAGES

REPORTED = ("model", "score", "calibration", "predicted_kl", "sample", "warnings", "failures")
# What the runners' extras install
PACKAGES = {"dask": "prefect-dask>=0.3.7,<0.4", "ray": "prefect-ray>=0.6,<0.7"}
EXTRAS = {"dask": ("prefect_dask", "distributed"), "ray": ("prefect_ray", "ray")}
CLUSTER_SECONDS = 10.0
SharedOut = SweepConfig | MeasureConfig  # runs that others than this process may share
Failures = Mapping[str, BaseException]  # name of a bitrate → its error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Results of a sweep, one score and sample per bitrate, rising.

    measurement: the file that all share; content: of `sweep.json`.
    """

    out: Path
    measurement: Path
    content: Mapping[str, Any] = field(repr=False)
    scores: tuple[Score, ...]
    samples: tuple[str, ...]
    warnings: tuple[str, ...]
    published: Published | None = None

    def __str__(self) -> str:
        """Return a line per bitrate for people; `repr` has everything."""
        models = compared(self.scores)
        return "\n".join([f"`{self.out}`", *(in_a_line(m.label, m) for m in models)])

    def record(self, published: Published) -> Self:
        """Record in the sweep's files where it was published, and return this with it."""
        where = {name: value for name, value in asdict(published).items() if name != "sent"}
        content = {**self.content, "published": where}
        write_json(self.out / SWEEP_FILE, content)
        write_text(self.out / REPORT_PAGE, write_up(self.out))
        return replace(self, published=published, content=content)


def check_runner(config: SharedOut) -> None:
    """Check the runner of a run before any work.

    Raises:
        ConfigError: it is not installed, has more workers than devices, or its cluster is away.
    """
    if config.runner is None:
        return
    missing = [name for name in EXTRAS.get(config.runner, ()) if find_spec(name) is None]
    if missing:
        names = " and ".join(f"`{name}`" for name in missing)
        raise ConfigError(
            f"the runner `{config.runner}` is not installed: no {names}; install it with "
            f"`{install([PACKAGES[config.runner]])}`"
        )
    if config.cluster:
        _check_cluster(config.runner, config.cluster)
    else:
        workers_of(config)


def _check_cluster(runner: str, address: str) -> None:
    """Connect to a cluster whose address has a host and a port."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.hostname and parts.port:
            socket.create_connection((parts.hostname, parts.port), CLUSTER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise no_cluster(runner, address, error) from None  # which may repeat the address


def no_cluster(runner: str, address: str | None, error: Exception) -> ConfigError:
    """Return the error for a cluster that cannot be used; None: one on this host."""
    shown = None if address is None else without_credentials(address)
    why = type(error).__name__ if shown != address else error
    where = "this host" if shown is None else f"`{shown}`"
    return ConfigError(f"no {runner} cluster answers at {where} ({why}); check `--cluster`")


def workers_of(config: SharedOut) -> int:
    """Return how many bitrates or shares to make at the same time where no cluster is given.

    Raises:
        ConfigError: there are more workers than GPUs.
    """
    if config.runner == "threads" or not (gpus := visible_gpus(config.device)):
        return config.workers or 1
    if config.workers and config.workers > len(gpus):
        raise ConfigError(
            f"{config.workers} workers need as many GPUs, there are {len(gpus)}; lower `--workers`"
        )
    return config.workers or len(gpus)


def conclude_sweep(config: SweepConfig, failures: Failures) -> Sweep:
    """Write the results of all bitrates, made or failed, and return them.

    Call `raise_failures` afterwards.
    """
    pipelines = {n: open_pipeline(c, STAGES) for n, c in config.models().items()}
    judged = {n: p for n, p in pipelines.items() if n not in failures or _is_judged(p)}
    reports = {n: read_json(p.path("validate") / REPORT_FILE) for n, p in judged.items()}
    scores = [s for p in judged.values() if (s := known_score(p.config.out)) is not None]
    models = compared(scores)
    _, warnings = check_bitrates(models)
    out = config.out.resolve()
    options = config.model_dump(mode="json", exclude={"work_root", "out", "clean_after"})
    if config.cluster is not None:
        options["cluster"] = without_credentials(config.cluster)
    content = {
        "source": str(config.source.resolve()),
        "options": options,
        "versions": versions(),
        "bitrates": {
            name: _bitrate(bpw, pipeline, reports.get(name), failures.get(name))
            for bpw, (name, pipeline) in zip(config.bpw, pipelines.items(), strict=True)
        },
        "differences": [known.to_json(lambda model: model.label) for known in differences(models)],
        "warnings": warnings,
        "published": None,
    }
    write_json(out / SWEEP_FILE, content)
    if scores:
        write_text(out / REPORT_PAGE, write_up(out))
    first = next(iter(pipelines.values()))
    return Sweep(
        out=out,
        measurement=config.measurement_file or first.path("measure") / MEASUREMENT_FILE,
        content=content,
        scores=tuple(scores),
        samples=tuple(reports[name]["sample"] for name in judged),
        warnings=tuple(warnings),
    )


def _is_judged(pipeline: Pipeline) -> bool:
    """Tell whether a failed bitrate was validated, so that only its verdict failed."""
    return "validate" in pipeline.stages and pipeline.is_complete("validate")


def _bitrate(
    bpw: float, pipeline: Pipeline, report: Mapping[str, Any] | None, failure: BaseException | None
) -> dict[str, object]:
    """Return the entry of one bitrate in `sweep.json`."""
    return {
        "bpw": bpw,
        "error": None if failure is None else str(failure),
        "report_folder": str(pipeline.path("validate")) if report else None,
        **({name: report[name] for name in REPORTED} if report else {}),
    }


def raise_failures(config: SweepConfig, failures: Failures) -> None:
    """Raise one error for all failed bitrates.

    Raises:
        Interrupted: a signal came.
        SweepFailed: naming each of them and its error.
    """
    for error in failures.values():
        if isinstance(error, Interrupted):
            raise error
    if failures:
        lines = [f"`{name}`: {_first_line(error)}" for name, error in failures.items()]
        made = len(config.bpw) - len(failures)
        rest = f"{made} of {len(config.bpw)} bitrates are made; repeat the command to make the rest"
        if config.publish is not None:
            rest += f" and publish all. Nothing was published to `{config.publish.repo}`"
        raise SweepFailed("\n".join([*lines, rest]))


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return (
        text if isinstance(error, Exl2FlowError) else f"unexpected {type(error).__name__}: {text}"
    )
