"""Everything that can refuse a run before it starts, checked once per command.

A command checks first, shows the plan, and hands both on to the flow, which runs in the same
process. A flow that a deployment started finds nothing handed on and checks for itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.ignored import tell_ignored
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.store.stage import Config, Stage
from exl2flow.pipeline.conversion import conversions_of
from exl2flow.pipeline.devices import checked_device
from exl2flow.pipeline.stages import stages_of
from exl2flow.quant.forecast.fit import Fit, find_fit
from exl2flow.quant.forecast.plan import Plan
from exl2flow.quant.forecast.preflight import check_disk, preflight
from exl2flow.quant.refine.stored_model import check_refinement


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[Config]):
    """A configuration that passed all checks.

    config: with a folder as its source and without `fit`; plans: one per model, by name.
    """

    config: Config
    plans: Mapping[str, Plan]
    fit: Fit | None = None

    @property
    def plan(self) -> Plan:
        """The only plan."""
        [plan] = self.plans.values()
        return plan

    def to_json(self) -> dict[str, object]:
        """Return the plan, or those of a sweep, and how the memory given is divided."""
        if isinstance(self.config, SweepConfig):
            return {"plans": {name: plan.to_json() for name, plan in self.plans.items()}}
        fit = {"fit": self.fit.to_json()} if self.fit else {}
        return {"plan": self.plan.to_json(), **fit}


_handed_on: ContextVar[Prepared[Any] | None] = ContextVar("prepared", default=None)


@contextmanager
def reuse_checks(prepared: Prepared[Config]) -> Iterator[None]:
    """Let what runs inside the block skip the checks of this configuration."""
    token = _handed_on.set(prepared)
    try:
        yield
    finally:
        _handed_on.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Ways to a source's folder; both take the source, its work root and its token block.

    outlined: provides the outline (`core.store.outline`) of a model that is not fetched yet, else
    None; fetched: returns the folder of a source, fetched if necessary.
    """

    outlined: Callable[[Path, Path, str | None], AbstractContextManager[Path | None]]
    fetched: Callable[[Path, Path, str | None], Path]


def prepare_source(
    config: Config, stages: Sequence[Stage[Any]], sources: Sources, *, dry_run: bool = False
) -> Prepared[Config]:
    """Check a run before its source is fetched, fetch it, and check it again with all values.

    Args:
        config: what to make.
        stages: see `prepare`.
        sources: the ways to its folder.
        dry_run: fetch nothing that can be checked without.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the source is a mistyped path.
        PreflightFailed, ConfigError, BudgetUnreachable, StoreError: see `prepare`.
    """
    given = (config.source, config.work_dir_root, config.token_block)
    with sources.outlined(*given) as outline:
        if outline is not None and dry_run:
            return prepare(_with_source(config, outline), stages)
        if outline is not None:
            _checked(_with_source(config, outline), stages)
    return prepare(_with_source(config, sources.fetched(*given)), stages)


def _with_source(config: Config, source: Path) -> Config:
    return config if source == config.source else config.model_copy(update={"source": source})


def prepare(config: Config, stages: Sequence[Stage[Any]]) -> Prepared[Config]:
    """Check a run whose source is a folder.

    Args:
        config: what to make.
        stages: those that will run; what they have finished needs no room. None of them: all is
            made anew.

    Raises:
        PreflightFailed: listing all problems, of a sweep those of the first bitrate that has any.
        StoreError: the disk has no room for all bitrates.
        ConfigError: the GPUs of a split are not there.
        ConfigError, SourceModelError: the model cannot be refined, or not by this reference.
        ConfigError, BudgetUnreachable, SourceModelError: nothing fits the memory that is given.
    """
    known = _handed_on.get()
    if known is not None and known.config == config:
        return known
    prepared = _checked(config, stages)
    tell_ignored(prepared.config, next(iter(prepared.plans.values())).device)
    return prepared


def _checked(config: Config, stages: Sequence[Stage[Any]]) -> Prepared[Config]:
    """Check a run as `prepare` does, and tell nothing."""
    fit = None
    checked_device(config)
    if isinstance(config, RefinementConfig):
        check_refinement(config)
    elif isinstance(config, ConversionConfig):
        fit = find_fit(config)
    if fit is not None:
        config = config.model_copy(update=fit.target)
    made = stages or stages_of(config)
    conversions = conversions_of(config).items()
    plans = {name: preflight(each, made, anew=not stages) for name, each in conversions}
    if isinstance(config, SweepConfig):
        check_disk(list(plans.values()))
    return Prepared(config=config, plans=plans, fit=fit)
