"""The parts of a run: its kind, the steps that carry it out, and what passed its checks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.runtime.whole_run import Watcher
from exl2flow.core.store.stage import Config, Pipeline, Stage
from exl2flow.pipeline.bitrates import Sweep
from exl2flow.pipeline.hub.publish import Published
from exl2flow.quant.forecast.fit import Fit
from exl2flow.quant.forecast.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[Config]):
    """A configuration that passed all checks.

    config: with a folder as its source and without `fit`; models: what it makes, by name; plans:
    one per model.
    """

    config: Config
    models: Mapping[str, RunOptions]
    plans: Mapping[str, Plan]
    fit: Fit | None = None

    @property
    def plan(self) -> Plan:
        """The only plan."""
        [plan] = self.plans.values()
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Ways to a source's folder; both take the source, its work root and its token block.

    outlined: provides the outline (`core.store.outline`) of a model that is not fetched yet, else
    None; fetched: returns the folder of a source, fetched if necessary.
    """

    outlined: Callable[[Path, Path, str | None], AbstractContextManager[Path | None]]
    fetched: Callable[[Path, Path, str | None], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A kind of run.

    stages: all that it has; whole: the ones that make its models in full;
    make: makes the result, a `Sweep` or a `Conversion`;
    shared: stages that run once for all models; empty: there is one model;
    check: refuses options before any work; check_source: refuses a source that is a folder;
    show: displays a result that was published.
    """

    stages: tuple[Stage[Any], ...]
    whole: tuple[Stage[Any], ...]
    make: Callable[["Run", Prepared[Any], "Steps"], Any]
    shared: tuple[Stage[Any], ...] = ()
    check: Callable[[Any], None] = lambda config: None
    check_source: Callable[[Any], None] = lambda config: None
    show: Callable[["Steps", Any, Any], None] = lambda steps, config, result: None

    @property
    def publishes(self) -> bool:
        """Whether its models are validated, so that they can be published."""
        return "validate" in [stage.name for stage in self.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a run: here without Prefect, in a flow as tasks.

    check: refuses what could not be published or made, before any work; sources: the ways to
    the folder of a source; run: runs all stages; make_bitrates: returns
    the errors of failed ones; share_out: lets a cluster make shares of a measurement; show:
    displays a sweep while it runs; publish: uploads results;
    watch: shows how far the run inside its block is.
    """

    check: Callable[[Run, RunOptions], None]
    sources: Sources
    run: Callable[[Pipeline], object]
    make_bitrates: Callable[[SweepConfig, StopRequest], Mapping[str, BaseException]]
    share_out: Callable[[MeasureConfig, Pipeline], None]
    show: Callable[[SweepConfig, Sweep], None]
    publish: Callable[[PublishConfig], Published]
    watch: Callable[[RunOptions], AbstractContextManager[Watcher]]
