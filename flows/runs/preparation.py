"""Everything that can refuse a run before it starts, checked once per command.

A command checks first, shows the plan, and hands both on to the flow, which runs in the same
process. A flow that a deployment started finds nothing handed on and checks for itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from exl2flow.core.options.config import ConversionConfig, RunOptions
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.store.stage import Stage
from exl2flow.quant.forecast.fit import Fit, find_fit, fitted
from exl2flow.quant.forecast.plan import Plan
from exl2flow.quant.forecast.preflight import check_disk, preflight
from exl2flow.quant.refine.stored_model import check_refinement
from exl2flow.tasks.stages import STAGES

Config = TypeVar("Config", bound=RunOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Generic[Config]):
    """A configuration that passed all checks.

    config: with a folder as its source and without `fit`; plans: one per conversion, by name.
    """

    config: Config
    plans: Mapping[str, Plan]
    fit: Fit | None = None

    @property
    def plan(self) -> Plan:
        """The only plan."""
        [plan] = self.plans.values()
        return plan


_handed_on: ContextVar[Prepared[Any] | None] = ContextVar("prepared", default=None)


@contextmanager
def reuse_checks(prepared: Prepared[Config]) -> Iterator[None]:
    """Let what runs inside the block skip the checks of this configuration."""
    token = _handed_on.set(prepared)
    try:
        yield
    finally:
        _handed_on.reset(token)


def _unless_handed_on(config: Config, check: Callable[[], Prepared[Config]]) -> Prepared[Config]:
    known = _handed_on.get()
    return known if known is not None and known.config == config else check()


def prepare(config: ConversionConfig, stages: Sequence[Stage]) -> Prepared[ConversionConfig]:
    """Check a conversion whose source is a folder.

    Args:
        config: the conversion.
        stages: those that will run; what they have finished needs no room. None of them: all is
            made anew.

    Raises:
        PreflightFailed: listing all problems.
        ConfigError, BudgetUnreachable, SourceModelError: nothing fits the memory that is given.
    """

    def check() -> Prepared[ConversionConfig]:
        fit = find_fit(config)
        target = fitted(config, fit)
        return Prepared(config=target, plans={target.target: preflight(target, stages)}, fit=fit)

    return _unless_handed_on(config, check)


def prepare_sweep(config: SweepConfig) -> Prepared[SweepConfig]:
    """Check all bitrates of a sweep whose source is a folder.

    Raises:
        PreflightFailed: listing the problems of the first bitrate that has any.
        StoreError: the disk has no room for all of them.
    """

    def check() -> Prepared[SweepConfig]:
        plans = {name: preflight(each, STAGES) for name, each in config.conversions().items()}
        check_disk(list(plans.values()))
        return Prepared(config=config, plans=plans)

    return _unless_handed_on(config, check)


def prepare_refinement(
    config: RefinementConfig, stages: Sequence[Stage]
) -> Prepared[RefinementConfig]:
    """Check a refinement whose reference is a folder; `stages` as for `prepare`.

    Raises:
        ConfigError, SourceModelError: problems with the model, or it is not the reference's.
        PreflightFailed: problems with the reference, the output or the options.
    """

    def check() -> Prepared[RefinementConfig]:
        check_refinement(config)
        plan = preflight(cast(ConversionConfig, config), stages)  # stages read it as such, too
        return Prepared(config=config, plans={config.target: plan})

    return _unless_handed_on(config, check)
