"""The process of a worker: Prefect's own program, with a worker that skips runs it still holds.

When the process of a run is killed, the run is scheduled again while its worker still cleans up.
Prefect's worker then takes it a second time, which its limiter refuses with an error that ends the
worker. Upstream: https://github.com/PrefectHQ/prefect/issues/16806

On SIGTERM, Prefect's worker sends itself SIGINT and leaves that to asyncio, which installs no
handler if the process inherited an ignored SIGINT, as from `exl2flow server up &` in a script.
"""

import signal
from typing import Any

from prefect.cli import app
from prefect.workers import ProcessWorker

_submit = ProcessWorker._submit_scheduled_flow_runs


async def submit_others(worker: ProcessWorker, flow_run_response: list[Any]) -> list[Any]:
    """Start the runs that were found, except the ones that the worker still holds."""
    held = worker.limiter.statistics().borrowers
    others = [entry for entry in flow_run_response if entry.flow_run.id not in held]
    return await _submit(worker, others)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ProcessWorker._submit_scheduled_flow_runs = submit_others  # type: ignore[assignment]
    app()  # with the arguments of this process, which include `--limit`
