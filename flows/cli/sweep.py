"""`exl2flow sweep`: one model at several bits per weight, from one measurement."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl2flow.core.errors import ConfigError, SweepFailed
from exl2flow.core.pace import clock
from exl2flow.core.sweep import SWEEP_FILE, Runner, SweepConfig
from exl2flow.core.words import size
from exl2flow.flows.cli.console import OUT, emit_json, say, show
from exl2flow.flows.cli.options import Source, Values, build_sweep, with_settings
from exl2flow.flows.cli.progress import shown
from exl2flow.flows.cli.running import NOT_PUBLISHED, ONLY_PUBLISHING, flow_server, run_flow
from exl2flow.flows.cli.setting import one_of
from exl2flow.flows.cli.settings import SWEEP
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
    "A bitrate that fails does not stop the others; repeating the command makes only what is "
    "missing.",
)


@with_settings(*SWEEP)
def sweep(
    source: Source,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder that receives a folder per bitrate (`4.0bpw`), `sweep.json` and "
            "`report.html`.",
            show_default=False,
        ),
    ],
    bpw: Annotated[
        str,
        typer.Option(
            "--bpw",
            metavar="BITS,…",
            help="Bits per weight to make, each from 2 to 8, separated by commas.",
            show_default=False,
        ),
    ],
    values: Values,
    runner: Annotated[
        Runner,
        typer.Option(
            "--runner",
            metavar="threads|processes|dask|ray",
            parser=one_of(Runner),
            help="What makes the bitrates: threads of one process, processes with a GPU each, or "
            "workers of Dask or Ray.",
        ),
    ] = "threads",
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            help="Bitrates that are made at the same time.",
            show_default="one per GPU; 1 with threads",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ADDRESS",
            help="A Dask or Ray cluster that runs already.",
            show_default="one for this sweep",
        ),
    ] = None,
    no_prefect: Annotated[
        bool,
        typer.Option("--no-prefect", help="Run the stages directly, one bitrate after the other."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print the plan or all problems, stop."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout: plans and results.")
    ] = False,
) -> None:
    """Convert a model at several bits per weight from one measurement, and compare the results.

    Tokens, sensitivity and measurement are made once. A folder with the comparison is left behind,
    with a report that is one page.
    """
    running = {"runner": runner, "workers": workers, "cluster": cluster}
    given = {name: value for name, value in running.items() if value is not None}
    config = build_sweep(source, out, {**values, **given, "bpw": _bits(bpw)})
    if no_prefect and (runner != "threads" or (workers or 1) > 1):
        raise ConfigError("`--no-prefect` makes one bitrate after the other; leave out `--runner`")
    with flow_server(wanted=not (no_prefect or dry_run)) as server:
        _sweep(config, server, dry_run=dry_run, as_json=as_json)


def _sweep(config: SweepConfig, server: "Api | None", *, dry_run: bool, as_json: bool) -> None:
    begun = time.monotonic()
    from exl2flow.flows.bitrates import check_runner, preflight_sweep  # these import torch
    from exl2flow.flows.release import check_release

    check_runner(config)
    check_release(config)
    config = with_local_source(config, plain=as_json)
    plans = preflight_sweep(config)
    if not as_json:
        show(plan_table(_plan_rows(config, plans)))
    if dry_run:
        if as_json:
            emit_json({"plans": {name: plan.to_json() for name, plan in plans.items()}})
        return
    failure = None
    with shown(plain=as_json):
        try:
            _run(config, server)
        except (SweepFailed, *NOT_PUBLISHED) as error:
            if not (config.out.expanduser() / SWEEP_FILE).exists():
                raise
            failure = error  # what was made is shown first
    _tell(config, plans, time.monotonic() - begun, as_json=as_json)
    if isinstance(failure, NOT_PUBLISHED):
        say(ONLY_PUBLISHING)
    if failure is not None:
        raise failure


def _bits(text: str) -> tuple[float, ...]:
    """Return the numbers in a list with commas.

    Raises:
        ConfigError: there is something else in it.
    """
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ConfigError(
            f"`--bpw {text}` is not a list of numbers with commas, such as `2.5,3,4`"
        ) from None


def _plan_rows(config: SweepConfig, plans: Mapping[str, "Plan"]) -> list[tuple[str, str]]:
    """Return (what, value) of all bitrates; most of their plans is the same."""
    rows = dict(next(iter(plans.values())).rows())
    sizes = [f"{name} about {size(plan.output_bytes)}" for name, plan in plans.items()]
    several = {"target": ", ".join(plans), "output": f"{config.out}: {', '.join(sizes)}"}
    most = max(plans.values(), key=lambda plan: plan.memory_bytes)
    return list({**rows, **several, "memory": dict(most.rows())["memory"]}.items())


def _run(config: SweepConfig, server: "Api | None") -> None:
    if server:
        run_flow(server, "sweep", config)
    else:
        from exl2flow.flows.local import sweep_locally

        sweep_locally(config)


def _tell(
    config: SweepConfig, plans: Mapping[str, "Plan"], seconds: float, *, as_json: bool
) -> None:
    from exl2flow.core.files import read_json

    out = config.out.expanduser().resolve()
    content = read_json(out / SWEEP_FILE)
    if as_json:
        outline = {name: plan.to_json() for name, plan in plans.items()}
        emit_json({"plans": outline, "seconds": round(seconds, 1), "out": str(out), **content})
        return
    print_sweep(out, content)
    if content["published"]:
        print_published(content["published"])
    OUT.print(f"time    {clock(seconds)}", markup=False)
