"""`exl2flow doctor`: its probes on this machine and on pretended ones, and its conclusions."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from exl2flow.cli.main import app
from exl2flow.cli.work import gpus as gpu_probes
from exl2flow.cli.work.doctor import rows, show_machine
from exl2flow.cli.work.findings import Findings, Machine, findings
from exl2flow.cli.work.gpus import (
    CupyBuild,
    Driver,
    Gpu,
    Gpus,
    TorchBuild,
    listed_by,
    probe_card,
    probe_cupy,
    probe_driver,
    probe_torch,
    timed,
)
from exl2flow.cli.work.machine import (
    Disk,
    Extra,
    HostMemory,
    PrefectServer,
    System,
    hub_folder,
    probe_disk,
    probe_extra,
    probe_memory,
    probe_server,
    tried,
)
from exl2flow.core.installing import pip

GIB = 1 << 30
PIP = pip()
CARD = Gpu(name="NVIDIA H200", total=150 * GIB, free=149 * GIB, capability="9.0", copy_rate=4500.0)
WORKING = Gpus(
    driver=Driver(version="580.95.05", cuda="13.0"),
    torch=TorchBuild(version="2.13.0", works=True, cuda="13.0", gpus=1),
    cupy=CupyBuild(packages=("cupy-cuda13x 14.2.0",), nvrtc="13.5", runs=True),
    cards=(CARD,),
)
NOTHING = Gpus(
    driver=Driver(),
    torch=TorchBuild(version="2.13.0+cpu", works=True),
    cupy=CupyBuild(),
    cards=(),
)
COMPLETE = tuple(
    Extra(name=name, versions={"a": "1"}, missing=()) for name in ("base", "convert", "prefect")
)


def machine(gpus: Gpus = WORKING, **others: Any) -> Machine:
    made = Machine(
        exl2flow="0.1.0",
        system=System(python="3.12.3", platform="Linux", processors=2),
        memory=HostMemory(total=16 * GIB, available=8 * GIB, pinned_limit=8 << 20),
        disks=(Disk(use="work root", folder="/w", free=GIB),),
        gpus=gpus,
        server=PrefectServer(),
        extras=COMPLETE,
    )
    return replace(made, **others)


def found(gpus: Gpus = WORKING, **others: Any) -> Findings:
    return findings(machine(gpus, **others))


def fake_program(folder: Path, script: str) -> Path:
    """Put a program `nvidia-smi` into a folder."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


# The command


def test_json_says_what_is_installed_here_and_that_all_of_it_works(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--work-root", str(tmp_path / "w")])

    found = json.loads(done.stdout)
    assert done.exit_code == (0 if found["healthy"] else 1)
    assert found["exl2flow"] == version("exl2flow")
    assert found["gpus"]["torch"]["version"] == torch.__version__
    assert found["extras"][0]["versions"]["torch"] == version("torch")
    assert found["disks"][0]["folder"] == str(tmp_path / "w")
    assert not (tmp_path / "w").exists()
    assert found["works"][0].startswith("run models")
    if not torch.cuda.is_available():
        assert found["gpus"]["cards"] == []
        assert found["fails"][0]["what"] == "use the GPU"


def test_the_table_has_what_json_has() -> None:
    done = CliRunner().invoke(app, ["doctor"])

    titles = [line.split("  ")[0] for line in done.stdout.splitlines()]
    for title in ("exl2flow", "Python", "torch", "CuPy", "memory", "Hub cache", "base", "works"):
        assert title in titles
    assert torch.__version__ in done.stdout


def test_torch_that_is_damaged_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libc10.so: damaged\\nmore')\n")
    entries = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]

    done = subprocess.run(
        [sys.executable, "-m", "exl2flow.flows.cli", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, entries))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert found["gpus"]["torch"]["problem"] == "libc10.so: damaged"
    assert found["fails"][0]["why"] == "torch cannot be imported: libc10.so: damaged"
    assert found["fails"][0]["command"] == f"{PIP} install --force-reinstall 'torch>=2.11'"
    assert not any(what.startswith("run models") for what in found["works"])


def test_a_server_that_does_not_answer_fails_and_its_password_is_not_printed() -> None:
    variables = {"PREFECT_API_URL": "http://me:secret@127.0.0.1:1/api"}

    done = CliRunner().invoke(app, ["doctor", "--json"], env=variables)

    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert found["server"]["url"] == "http://127.0.0.1:1/api"
    assert "refused" in found["server"]["problem"]
    assert "secret" not in done.output


# Probes of the machine


def test_what_a_probe_raises_becomes_words() -> None:
    def broken() -> HostMemory:
        raise AttributeError("no such thing\nand more")

    assert tried(broken, lambda why: HostMemory(problem=why)).problem == "no such thing"


def test_memory_is_that_of_this_machine() -> None:
    memory = probe_memory()

    assert memory.total is not None
    assert memory.available is not None
    assert memory.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory.available < memory.total


def test_a_folder_that_does_not_exist_yet_has_the_disk_of_its_parent(tmp_path: Path) -> None:
    disk = probe_disk("work root", tmp_path / "a" / "b")

    assert (disk.folder, disk.problem) == (str(tmp_path / "a" / "b"), None)
    assert disk.free is not None
    assert disk.free > 0


def test_a_folder_in_which_nothing_can_be_written_is_a_problem() -> None:
    disk = probe_disk("work root", Path("/proc/1/x"))

    assert (disk.problem is None) == os.access("/proc/1", os.W_OK)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HOME": "/hub"}, "/hub"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/huggingface"),
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface"),
    ],
)
def test_the_hub_cache_is_where_hugging_face_has_it(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert hub_folder() == Path(folder)


@pytest.mark.parametrize(("body", "is_well"), [(b"true", True), (b"<html>", False)])
def test_the_server_is_asked_for_its_health(
    body: bytes, is_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.handle_request).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api/")
        assert (probe_server().problem is None) == is_well


@pytest.mark.parametrize("url", ["nonsense", "http://[", "ftp://127.0.0.1:1/api"])
def test_an_address_that_is_none_is_a_problem_in_words(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)

    assert tried(probe_server, lambda why: PrefectServer(problem=why)).problem


def test_extras_are_those_of_the_installed_package() -> None:
    extra = probe_extra("convert")

    assert extra.versions["scipy"] == version("scipy")
    assert "torch" in probe_extra("base").versions
    assert extra.missing == ()


# Probes of GPUs


def test_gpus_are_listed_by_the_program_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "NVIDIA H200, 580.95.05, 143771, 143000, 9.0\nNVIDIA GB10, 580.95.05, [N/A], [N/A], 12.1"
    fake_program(tmp_path, f"cat <<'X'\n{told}\nX")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    driver, cards = probe_driver()

    assert driver.version == "580.95.05"
    assert driver.problem is None
    assert cards == (
        Gpu(name="NVIDIA H200", total=143771 << 20, free=143000 << 20, capability="9.0"),
        Gpu(name="NVIDIA GB10", capability="12.1"),
    )


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "echo NVIDIA-SMI has failed because it could not communicate; exit 9",
            "`nvidia-smi` fails: NVIDIA-SMI has failed because it could not communicate",
        ),
        ("exit 4", "`nvidia-smi` fails: exit code 4"),
        ("echo No devices were found; exit 6", None),
    ],
)
def test_a_driver_that_fails_is_told_in_its_words(
    script: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_program(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    driver, cards = probe_driver()

    assert (driver.problem, cards) == (problem, ())


def test_a_program_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probes, "SMI_SECONDS", 0.05)
    program = fake_program(tmp_path, "exec sleep 60")

    with pytest.raises(subprocess.TimeoutExpired):
        listed_by(str(program))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_torch_without_a_gpu_sees_none_and_says_so_of_a_card() -> None:
    build = probe_torch()

    assert (build.version, build.works, build.gpus) == (torch.__version__, True, 0)
    card = tried(lambda: probe_card(0), lambda why: Gpu(problem=why))
    assert card.problem is not None
    assert "CUDA" in card.problem
    assert timed(CARD, 0).problem is not None


def test_cupy_compiles_a_kernel_without_a_gpu() -> None:
    build = probe_cupy(0)

    assert build.problem is None
    assert build.nvrtc is not None
    assert build.runs is None
    assert any(package.startswith("cupy-cuda") for package in build.packages)


def test_cupy_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ptx", "trial"):
        monkeypatch.delitem(sys.modules, f"exl2flow.kernels.cuda.{name}", raising=False)
        monkeypatch.delattr(f"exl2flow.kernels.cuda.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)  # as Python marks what is not there

    build = probe_cupy(0)

    assert build.packages
    assert build.problem is not None
    assert "cupy" in build.problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cupy_that_cannot_run_says_why() -> None:
    build = probe_cupy(1)

    assert build.runs is False
    assert build.problem is not None
    assert "cuda" in build.problem.lower()


# Conclusions


def test_a_machine_where_all_is_well_has_nothing_to_type() -> None:
    well = found()

    assert well.is_healthy
    assert (well.fails, well.commands) == ((), ())
    assert "use the GPU: NVIDIA H200" in well.works


def test_without_a_gpu_the_rest_works() -> None:
    plain = found(NOTHING)

    assert plain.is_healthy
    assert [failure.why for failure in plain.fails] == ["no NVIDIA GPU, or no driver for it"]
    assert plain.commands == ()


OLD = Driver(version="550.54", cuda="12.4")
NO_CUDA = TorchBuild(version="2.13.0+cpu", works=True)


@pytest.mark.parametrize(
    ("changes", "why", "command"),
    [
        ({"cupy": CupyBuild()}, "CuPy is missing", f"{PIP} install 'cupy-cuda13x>=14'"),
        (
            {
                "driver": OLD,
                "cupy": CupyBuild(),
                "torch": TorchBuild(version="2.13.0+cu126", works=True, cuda="12.6", gpus=1),
            },
            "CuPy is missing",
            f"{PIP} install 'cupy-cuda12x>=14'",
        ),
        (
            {
                "driver": OLD,
                "cupy": replace(WORKING.cupy, runs=False, problem="cudaErrorInsufficientDriver"),
                "torch": TorchBuild(version="2.13.0+cu126", works=True, cuda="12.6", gpus=1),
            },
            "CuPy does not work: cudaErrorInsufficientDriver",
            f"{PIP} uninstall -y cupy-cuda13x && {PIP} install 'cupy-cuda12x>=14'",
        ),
        (
            {"cupy": replace(WORKING.cupy, nvrtc=None, problem="failed to load libnvrtc.so.13")},
            "libnvrtc",
            f"{PIP} install 'nvidia-cuda-nvrtc>=13'",
        ),
        (
            {"cupy": replace(WORKING.cupy, runs=False, problem="damaged")},
            "damaged",
            f"{PIP} install --force-reinstall 'cupy-cuda13x>=14'",
        ),
        (
            {
                "cupy": CupyBuild(
                    packages=("cupy-cuda12x 14.2.0", "cupy-cuda13x 14.2.0"), problem="no"
                )
            },
            "CuPy does not work",
            f"{PIP} uninstall -y cupy-cuda12x cupy-cuda13x && {PIP} install 'cupy-cuda13x>=14'",
        ),
        ({"torch": NO_CUDA}, "without CUDA", f"{PIP} install --force-reinstall 'torch>=2.11'"),
        ({"torch": NO_CUDA, "driver": OLD}, "https://pytorch.org", None),
        (
            {"torch": replace(WORKING.torch, gpus=0), "driver": OLD},
            "torch is built for CUDA 13.0, the driver supports 12.4",
            None,
        ),
        (
            {"torch": replace(WORKING.torch, gpus=0, problem="CUDA unknown error")},
            "CUDA unknown error",
            None,
        ),
        ({"driver": Driver(version="470", cuda="11.4")}, "install a newer driver", None),
        ({"driver": Driver(problem="`nvidia-smi` fails: x"), "cards": ()}, "fails: x", None),
        ({"cards": (replace(CARD, problem="out of memory"),)}, "H200: out of memory", None),
        (
            {"cards": (Gpu(name="RTX 2080", capability="7.5"),)},
            "RTX 2080 has compute capability 7.5, the kernels need 8.0",
            None,
        ),
    ],
)
def test_a_gpu_that_should_work_is_a_fault_with_its_remedy(
    changes: dict[str, Any], why: str, command: str | None
) -> None:
    broken = found(replace(WORKING, **changes))

    (failure,) = broken.fails
    assert not broken.is_healthy
    assert why in failure.why
    assert failure.command == command
    assert not any(what.startswith("use the GPU") for what in broken.works)


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_no_fault(value: str) -> None:
    hidden = found(replace(WORKING, torch=replace(WORKING.torch, gpus=0), hidden_by=value))

    assert hidden.is_healthy
    assert hidden.commands == ("unset CUDA_VISIBLE_DEVICES",)


def test_an_extra_that_is_missing_is_no_fault_but_the_base_is() -> None:
    base, _, prefect = COMPLETE
    missing = Extra(name="convert", versions={"scipy": None}, missing=("scipy>=1.15",))
    partial = found(extras=(base, missing, prefect))
    broken = found(extras=(replace(base, missing=("rich>=15",)), missing, prefect))

    assert partial.is_healthy
    assert partial.commands == (f"{PIP} install 'scipy>=1.15'",)
    assert "the extra `convert` is missing or incomplete: scipy>=1.15" in partial.fails[0].why
    assert not broken.is_healthy
    assert broken.commands == (f"{PIP} install 'rich>=15'", f"{PIP} install 'scipy>=1.15'")


def test_disks_and_servers_that_fail_are_faults() -> None:
    disk = Disk(use="work root", folder="/w", free=1, problem="`/w` cannot be written to")
    server = PrefectServer(url="http://x/api", problem="it does not answer: refused")

    ill = found(disks=(disk,), server=server)

    assert [failure.what for failure in ill.fails] == [
        "work root `/w`",
        "Prefect's server `http://x/api`",
    ]
    assert not ill.is_healthy


def test_a_gpu_has_a_row_with_its_memory_and_rate() -> None:
    lines = dict(rows(machine()))

    assert lines["GPU 0"] == (
        "NVIDIA H200, 161.06 GB, 159.99 GB free, compute capability 9.0, copies at 4,500 GB/s"
    )
    assert lines["NVIDIA driver"] == "580.95.05, supports CUDA up to 13.0"
    assert lines["CuPy"] == "cupy-cuda13x 14.2.0, NVRTC 13.5, a kernel compiles and runs"
    assert lines["memory"] == "8.59 GB of 17.18 GB available, pinned at most 8.39 MB (ulimit -l)"


def test_the_lists_follow_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_machine(machine(replace(WORKING, cupy=CupyBuild())))

    told = capsys.readouterr().out
    order = [told.index(title) for title in ("works\n", "does not work\n", "what to type\n")]
    assert order == sorted(order)
    assert told.rstrip().endswith(f"  {PIP} install 'cupy-cuda13x>=14'")
