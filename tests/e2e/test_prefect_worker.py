"""The deployments of `prefect.yaml`, run by a worker: completed, cancelled, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conversions import FileIdentity, small_config, snapshot
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.states import Cancelling
from prefect.workers import ProcessWorker
from prefect_runs import run_name, run_state, task_states
from tiny import make_tiny

from exl2flow.core.config import ConversionConfig
from exl2flow.flows.local import run_locally

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.executable).with_name("prefect"))
RUN_SECONDS = 120.0


class Worker:
    """A worker of the pool in `prefect.yaml`, and what a test does to its runs."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder

    def submit(self, deployment: str, parameters: dict[str, object]) -> UUID:
        """Create a run of a deployment."""
        with get_client(sync_client=True) as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def wait(self, run: UUID) -> str:
        """Return the name of the run's final state."""
        final = {"Completed", "Failed", "Crashed", "Cancelled"}
        wait_for(lambda: run_state(run) in final)
        return run_state(run)

    def flow_process(self) -> int:
        """Return the process id of the flow that the worker runs."""
        wait_for(lambda: self.children() != [])
        return self.children()[0]

    def children(self) -> list[int]:
        """Return the process ids of the worker's children."""
        folders = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for folder in folders for pid in (folder / "children").read_text().split()]


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def worker(
    prefect_env: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    env = {**prefect_env, "PREFECT_WORKER_QUERY_SECONDS": "1"}
    template = ProcessWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name="exl2flow", type="process", base_job_template=template)
    with get_client(sync_client=True) as client:
        client.create_work_pool(pool)
    subprocess.run(
        [PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", str(ROOT / "prefect.yaml")],
        cwd=folder,
        env={**env, "PWD": str(folder)},
        check=True,
    )
    process = subprocess.Popen(
        [PREFECT, "worker", "start", "--pool", "exl2flow", "--limit", "1"], cwd=folder, env=env
    )
    yield Worker(process, folder)
    process.terminate()
    process.wait(timeout=60)


def parameters_of(config: ConversionConfig) -> dict[str, object]:
    """Return the deployment parameters that stand for a configuration."""
    return {"config": config.model_dump(mode="json")}


def test_worker_completes_both_deployments_with_paths_relative_to_their_folder(
    worker: Worker,
) -> None:
    make_tiny("llama", worker.folder / "tiny")
    config = small_config(Path("tiny"), Path("out"), bpw=4.0)
    comparison = {
        "models": ["out"],
        "reference": "tiny",
        "options": {"rows": 1, "row_tokens": 64, "sample_tokens": 4, "fail_perplexity_ratio": 100},
    }

    converting = worker.submit("convert/convert", parameters_of(config))
    assert worker.wait(converting) == "Completed"
    validating = worker.submit("validate/validate", {"config": comparison})
    assert worker.wait(validating) == "Completed"

    assert run_name(converting) == "tiny@4bpw"
    assert set(task_states(converting).values()) == {"Completed"}
    assert task_states(validating) == {"score": "Completed", "sample out": "Completed"}
    assert (worker.folder / "out" / "model.safetensors").is_file()


def manifest_of(root: Path, stage: str) -> dict[str, Any]:
    """Return the manifest of the only folder of a stage."""
    [path] = root.glob(f"tiny-*/{stage}/*/manifest.json")
    manifest: dict[str, Any] = json.loads(path.read_bytes())
    return manifest


def wait_for_cursor(root: Path, stage: str, cursor: int) -> None:
    """Return when a stage has come that far."""

    def is_there() -> bool:
        begun = list(root.glob(f"tiny-*/{stage}/*/manifest.json"))
        return bool(begun) and manifest_of(root, stage)["cursor"] >= cursor

    wait_for(is_there)


@pytest.mark.slow
def test_runs_killed_twice_go_on_to_the_same_bytes(worker: Worker, tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "tiny", num_hidden_layers=16)
    config = small_config(source, tmp_path / "out", bpw=4.0)
    whole = config.model_copy(update={"out": tmp_path / "o2", "work_root": tmp_path / "other"})
    run_locally(whole)
    root = config.work_dir_root
    finished: dict[str, FileIdentity] = {}

    for stage in ("measure", "quantize"):
        run = worker.submit("convert/convert", parameters_of(config))
        wait_for_cursor(root, stage, 4)
        os.kill(worker.flow_process(), signal.SIGKILL)
        assert worker.wait(run) == "Crashed"
        manifest = manifest_of(root, stage)
        assert manifest["status"] == "partial"
        assert 0 < manifest["cursor"] < manifest["total"]
        [folder] = root.glob(f"tiny-*/{stage}/*")
        files = snapshot(folder)
        finished |= {str(folder / name): files[str(folder / name)] for name in manifest["files"]}

    run = worker.submit("convert/convert", parameters_of(config))
    assert worker.wait(run) == "Completed"

    assert task_states(run)["measure"] == "Cached"
    assert finished.items() <= snapshot(root).items()
    made, expected = (folder / "model.safetensors" for folder in (config.out, whole.out))
    assert made.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_cancelled_run_keeps_what_was_finished(worker: Worker, tmp_path: Path) -> None:
    source = make_tiny(
        "llama", tmp_path / "tiny", num_hidden_layers=16, hidden_size=256, intermediate_size=512
    )
    config = small_config(source, tmp_path / "out", bpw=4.0)
    root = config.work_dir_root

    run = worker.submit("convert/convert", parameters_of(config))
    wait_for_cursor(root, "measure", 2)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Cancelling())

    assert worker.wait(run) == "Cancelled"
    manifest = manifest_of(root, "measure")
    assert manifest["status"] == "partial"
    assert 0 < manifest["cursor"] < manifest["total"]
    wait_for(lambda: worker.children() == [])
