"""The process of a worker: Prefect's own program, whose worker passes over runs that it still has.

When the process of a run is killed, the run is scheduled again while its worker still clears up
after it. Prefect's worker then takes it a second time, which its limiter forbids, and ends.
"""

from typing import Any

from prefect.cli import app
from prefect.workers import ProcessWorker

_submit = ProcessWorker._submit_scheduled_flow_runs


async def submit_others(worker: ProcessWorker, flow_run_response: list[Any]) -> list[Any]:
    """Start the runs that were found, but those that the worker has not done with."""
    limiter = worker._limiter  # none without `--limit`
    held = limiter.statistics().borrowers if limiter else ()
    others = [entry for entry in flow_run_response if entry.flow_run.id not in held]
    return await _submit(worker, others)


def main() -> None:
    """Run `prefect` with the arguments of this process."""
    ProcessWorker._submit_scheduled_flow_runs = submit_others  # type: ignore[assignment]
    app()


if __name__ == "__main__":
    main()
