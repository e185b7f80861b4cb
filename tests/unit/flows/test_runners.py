"""What is known of a sweep's runner before any work."""

import socket
import sys
from pathlib import Path

import pytest
import torch
from tiny import make_tiny
from typer.testing import CliRunner

from exl2flow.core.errors import ConfigError
from exl2flow.core.sweep import Runner, SweepConfig
from exl2flow.flows.bitrates import check_runner
from exl2flow.flows.cli.main import app


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

    with pytest.raises(ConfigError, match=rf"no `{module}`; .*pip install 'exl2flow\[{runner}\]'"):
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


def test_a_dry_run_refuses_a_runner_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    source, out = str(make_tiny("llama", tmp_path / "model")), str(tmp_path / "out")

    result = CliRunner().invoke(
        app, ["sweep", source, "--out", out, "--bpw", "4", "--runner", "ray", "--dry-run"]
    )

    assert result.exit_code == 2
    assert "pip install 'exl2flow[ray]'" in " ".join(result.stderr.split())
    assert "model" not in result.stdout  # no plan
