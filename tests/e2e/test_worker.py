"""The process of a worker: how it ends."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from exl2flow.flows.server.services import Home, ServerSettings, command

# As a shell starts `exl2flow server up &` in a script; its child processes inherit that.
IGNORING_SIGINT = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
END_SECONDS = 20.0  # `down` kills after 30


def test_worker_that_was_started_with_sigint_ignored_ends_on_sigterm(
    prefect_env: Mapping[str, str], tmp_path: Path
) -> None:
    words = command(Home(tmp_path), ServerSettings(folder=tmp_path), "worker")
    with subprocess.Popen(
        [*IGNORING_SIGINT, *words],
        env=dict(prefect_env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("started!" in line for line in process.stdout)
        process.terminate()
        try:
            said, _ = process.communicate(timeout=END_SECONDS)
        finally:
            process.kill()

    assert "stopped!" in said
    assert process.returncode == 0
