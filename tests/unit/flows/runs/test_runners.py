"""What is known of a sweep's runner before any work."""

import inspect
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.sweep import SWEEP_FILE, Runner, SweepConfig
from exl2flow.flows.runs.runners import _ray, _settings_exported
from exl2flow.pipeline.bitrates import check_runner, conclude_sweep


def config_of(runner: Runner, **values: object) -> SweepConfig:
    return SweepConfig.model_validate(
        {"source": "model", "out": "out", "bpw": (3,), "runner": runner, **values}
    )


@pytest.mark.parametrize("runner", ["threads", "processes", "dask", "ray"])
def test_runners_that_are_installed_are_accepted(runner: Runner) -> None:
    check_runner(config_of(runner, workers=1))


@pytest.mark.parametrize(
    ("runner", "module"), [("dask", "prefect_dask"), ("dask", "distributed"), ("ray", "ray")]
)
def test_a_runner_that_is_not_installed_is_refused_with_the_way_to_install_it(
    runner: Runner, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed

    with pytest.raises(ConfigError, match=rf"no `{module}`; .*pip install 'prefect-{runner}>="):
        check_runner(config_of(runner))


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    check_runner(config_of("processes", workers=2))
    check_runner(config_of("dask", workers=3, cluster="auto"))
    with pytest.raises(ConfigError, match="3 workers need as many GPUs, there are 2"):
        check_runner(config_of("processes", workers=3))


def test_cluster_is_looked_for_where_its_address_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        for address in (place, f"tcp://{place}", "auto"):
            check_runner(config_of("dask", cluster=address))

    for address in (place, f"ray://{place}", "127.0.0.1:port"):
        with pytest.raises(ConfigError, match=f"no ray cluster answers at `{address}`"):
            check_runner(config_of("ray", cluster=address))


def test_credentials_of_a_cluster_are_in_no_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"

    for begin in ("tcp://me:secret", "me:secret", "tcp://me:sec/ret"):
        address = f"{begin}@{place}"
        with pytest.raises(ConfigError, match=r"no dask cluster answers at .*127") as caught:
            check_runner(config_of("dask", cluster=address))
        assert "sec" not in str(caught.value)
        assert caught.value.__suppress_context__


def test_credentials_of_a_cluster_are_not_in_the_results_of_a_sweep(tmp_path: Path) -> None:
    config = SweepConfig.model_validate(
        {
            "source": make_tiny("llama", tmp_path / "model"),
            "out": tmp_path / "out",
            "bpw": (3,),
            "runner": "dask",
            "cluster": "tcp://me:secret@127.0.0.1:8786",
        }
    )

    conclude_sweep(config, {"3.0bpw": ConfigError("it failed")})

    text = (tmp_path / "out" / SWEEP_FILE).read_text()
    assert '"cluster": "tcp://127.0.0.1:8786"' in text
    assert "secret" not in text


def test_a_dry_run_refuses_a_runner_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    source, out = str(make_tiny("llama", tmp_path / "model")), str(tmp_path / "out")

    result = CliRunner().invoke(
        app, ["sweep", source, "--out", out, "--bpw", "4", "--runner", "ray", "--dry-run"]
    )

    assert result.exit_code == 2
    assert "pip install 'prefect-ray>=0.6,<0.7'" in " ".join(result.stderr.split())
    assert "model" not in result.stdout  # no plan


def test_threads_find_the_server_that_only_a_context_names() -> None:
    """`prefect.context.refresh_global_settings_context` makes new threads see the environment."""
    found: list[str | None] = []

    def look() -> None:
        found.append(PREFECT_API_URL.value())

    def in_a_thread() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    in_a_thread()
    settings = {PREFECT_API_URL: "http://127.0.0.1:1/api", PREFECT_API_AUTH_STRING: "me:secret"}
    with temporary_settings(settings), _settings_exported():
        in_a_thread()
        assert os.environ["PREFECT_API_AUTH_STRING"] == "me:secret"
    in_a_thread()

    assert found[1] == "http://127.0.0.1:1/api"
    assert found[2] == found[0] != found[1]
    assert "PREFECT_API_AUTH_STRING" not in os.environ


def test_ray_is_started_on_the_loopback_interface() -> None:
    """`_node_ip_address` is the only argument of `ray.init` that says on which interface."""
    ray = pytest.importorskip("ray")

    runner = _ray(config_of("ray", workers=1), 1)

    assert runner.init_kwargs["_node_ip_address"] == "127.0.0.1"
    parameters = inspect.signature(ray.init).parameters
    assert "_node_ip_address" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
