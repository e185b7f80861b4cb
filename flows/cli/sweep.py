"""`exl2flow sweep`: one model at several bitrates, from one measurement."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from exl2flow.core.errors import ConfigError, SweepFailed
from exl2flow.core.options.sweep import SWEEP_FILE, SweepConfig
from exl2flow.core.runtime.pace import clock
from exl2flow.core.words import size
from exl2flow.flows.cli.console import emit_json, say, show, tell
from exl2flow.flows.cli.options import AsJson, DryRun, NoPrefect, flags, with_options
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.running import NOT_PUBLISHED, ONLY_PUBLISHING, flow_server, run_flow
from exl2flow.flows.cli.sources import with_local_source
from exl2flow.flows.cli.tables import plan_table, print_published, print_sweep

if TYPE_CHECKING:
    from exl2flow.flows.server.temporary import Api
    from exl2flow.quant.forecast.plan import Plan

EXAMPLES = (
    "Examples:",
    "exl2flow sweep ./Llama-3.2-1B --out ./Llama-3.2-1B-exl2 --bpw 2.5,3,4,5,6",
    "exl2flow sweep ./Llama-3.2-1B --out ./exl2 --bpw 3,4,5,6 --runner processes   (a GPU each)",
    "exl2flow sweep org/name --out ./exl2 --bpw 3,4,5,6 --publish me/name-exl2",
    "A bitrate that fails does not stop the others. Repeat the command to make what is missing.",
)


@with_options()
def sweep(
    *,
    config: SweepConfig,
    no_prefect: NoPrefect = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model at several bitrates from one measurement, and compare the results.

    Calibration tokens, sensitivity and measurement are shared by all bitrates.
    """
    if no_prefect and (config.runner != "threads" or (config.workers or 1) > 1):
        raise ConfigError(
            "`--no-prefect` makes one bitrate after the other; leave out `--runner` and `--workers`"
        )
    with flow_server(wanted=not (no_prefect or dry_run)) as server:
        _sweep(config, server, dry_run=dry_run, as_json=as_json)


def _sweep(config: SweepConfig, server: "Api | None", *, dry_run: bool, as_json: bool) -> None:
    begun = time.monotonic()
    from exl2flow.flows.runs.bitrates import check_runner  # these import torch
    from exl2flow.flows.runs.preparation import prepare_sweep
    from exl2flow.flows.runs.release import check_release

    check_runner(config)
    check_release(config)
    prepared = prepare_sweep(with_local_source(config, plain=as_json))
    config, plans = prepared.config, prepared.plans
    if not as_json:
        show(plan_table(_plan_rows(config, plans)))
    if dry_run:
        if as_json:
            emit_json({"plans": {name: plan.to_json() for name, plan in plans.items()}})
        return
    from exl2flow.flows.runs.local import sweep_locally

    failure = None
    with shown(plain=as_json):
        try:
            run_flow(server, "sweep", prepared, otherwise=sweep_locally)
        except (SweepFailed, *NOT_PUBLISHED) as error:
            if not (config.out / SWEEP_FILE).exists():
                raise
            failure = error  # the results are shown first
    _tell(config, plans, time.monotonic() - begun, as_json=as_json)
    if isinstance(failure, NOT_PUBLISHED):
        say(ONLY_PUBLISHING)
    if failure is not None:
        raise failure


def _plan_rows(config: SweepConfig, plans: Mapping[str, "Plan"]) -> list[tuple[str, str]]:
    """Return (what, value) for all bitrates, whose plans are mostly the same."""
    from exl2flow.core.store.changes import stage_rows  # imports torch

    rows = dict(next(iter(plans.values())).rows())
    sizes = [f"{name} about {size(plan.output_bytes)}" for name, plan in plans.items()]
    several = {"target": ", ".join(plans), "output": f"{config.out}: {', '.join(sizes)}"}
    stages = {name: dict(stage_rows(plan.stages, flags())) for name, plan in plans.items()}
    for what in dict.fromkeys(what for found in stages.values() for what in found):
        told = [f"{name}: {found[what]}" for name, found in stages.items() if what in found]
        several[what] = "; ".join(told)
    most = max(plans.values(), key=lambda plan: plan.memory_bytes)
    return list({**rows, **several, "memory": dict(most.rows())["memory"]}.items())


def _tell(
    config: SweepConfig, plans: Mapping[str, "Plan"], seconds: float, *, as_json: bool
) -> None:
    from exl2flow.core.store.files import read_json

    out = config.out.resolve()
    content = read_json(out / SWEEP_FILE)
    if as_json:
        outline = {name: plan.to_json() for name, plan in plans.items()}
        emit_json({"plans": outline, "seconds": round(seconds, 1), "out": str(out), **content})
        return
    print_sweep(out, content)
    if content["published"]:
        print_published(content["published"])
    tell(f"time    {clock(seconds)}")
