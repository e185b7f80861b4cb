"""Everything that can refuse a run before it starts, checked once per command.

A command checks first, shows the plan, and hands both on to the flow, which runs in the same
process. A flow that a deployment started finds nothing handed on and checks for itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from exl2flow.core.options.ignored import tell_ignored
from exl2flow.core.store.stage import Config
from exl2flow.pipeline.by_device import settled
from exl2flow.pipeline.devices import checked_device
from exl2flow.pipeline.run import Prepared, Run, Sources
from exl2flow.quant.forecast.fit import find_fit
from exl2flow.quant.forecast.preflight import check_disk, preflight

_handed_on: ContextVar[Prepared[Any] | None] = ContextVar("prepared", default=None)


@contextmanager
def reuse_checks(prepared: Prepared[Config]) -> Iterator[None]:
    """Let what runs inside the block skip the checks of this configuration."""
    token = _handed_on.set(prepared)
    try:
        yield
    finally:
        _handed_on.reset(token)


def prepare_source(
    run: Run, config: Config, sources: Sources, *, anew: bool = False, dry_run: bool = False
) -> Prepared[Config]:
    """Check a run before its source is fetched, fetch it, and check it again with all values.

    Args:
        run: its kind.
        config: what to make.
        sources: the ways to its folder.
        anew: see `prepare`.
        dry_run: fetch nothing that can be checked without.

    Raises:
        HubError: the model cannot be fetched.
        SourceModelError: the source is a mistyped path.
        PreflightFailed, ConfigError, BudgetUnreachable, StoreError: see `prepare`.
    """
    given = (config.source, config.work_dir_root, config.token_block)
    with sources.outlined(*given) as outline:
        if outline is not None and dry_run:
            return prepare(run, _with_source(config, outline), anew=anew)
        if outline is not None:
            _checked(run, _with_source(config, outline), anew=anew)
    return prepare(run, _with_source(config, sources.fetched(*given)), anew=anew)


def _with_source(config: Config, source: Path) -> Config:
    return config if source == config.source else config.model_copy(update={"source": source})


def prepare(run: Run, config: Config, *, anew: bool = False) -> Prepared[Config]:
    """Check a run whose source is a folder.

    Args:
        run: its kind; what its stages have finished needs no room.
        config: what to make.
        anew: all is made anew.

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
    prepared = _checked(run, config, anew=anew)
    tell_ignored(prepared.config, next(iter(prepared.plans.values())).device)
    return prepared


def _checked(run: Run, config: Config, *, anew: bool) -> Prepared[Config]:
    """Check a run as `prepare` does, and tell nothing."""
    if config.is_split:
        checked_device(config)
    config = settled(run, config)
    run.check_source(config)
    fit = find_fit(config)
    if fit is not None:
        config = config.model_copy(update=fit.target)
    models = config.models()
    plans = {
        name: preflight(model, run.whole, run=run.stages, anew=anew)
        for name, model in models.items()
    }
    if len(plans) > 1:
        check_disk(list(plans.values()), run.whole)
    return Prepared(config=config, models=models, plans=plans, fit=fit)
