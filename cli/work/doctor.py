"""The body of `exl2flow doctor`: asks all probes, and prints what they found for people."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from exl2flow.cli.output.console import show, tell
from exl2flow.cli.output.tables import plan_table
from exl2flow.cli.work.findings import Machine, findings
from exl2flow.cli.work.gpus import CupyBuild, Driver, Gpu, TorchBuild, probe_gpus
from exl2flow.cli.work.machine import (
    EXTRAS,
    Disk,
    HostMemory,
    PrefectServer,
    System,
    hub_folder,
    probe_disk,
    probe_extra,
    probe_memory,
    probe_server,
    probe_system,
    tried,
)
from exl2flow.core import words


def examine(work_root: Path) -> Machine:
    """Ask every probe."""
    disks = (("work root", work_root), ("Hub cache", hub_folder()))
    return Machine(
        exl2flow=version("exl2flow"),
        system=tried(probe_system, lambda why: System(platform=why)),
        memory=tried(probe_memory, lambda why: HostMemory(problem=why)),
        disks=tuple(_disk(use, folder) for use, folder in disks),
        gpus=probe_gpus(),
        server=tried(probe_server, lambda why: PrefectServer(problem=why)),
        extras=tuple(map(probe_extra, EXTRAS)),
    )


def _disk(use: str, folder: Path) -> Disk:
    return tried(
        lambda: probe_disk(use, folder), lambda why: Disk(use=use, folder=str(folder), problem=why)
    )


def show_machine(machine: Machine) -> None:
    """Print what was found as a table, then what works, what does not, and what to type."""
    show(plan_table([*rows(machine)]))
    found = findings(machine)
    if found.works:
        tell("\nworks", style="bold")
    for what in found.works:
        tell(f"  {what}")
    if found.fails:
        tell("\ndoes not work", style="bold")
    for failure in found.fails:
        tell(f"  {failure.what}: {failure.why}", style="red" if failure.is_fault else "")
    if found.commands:
        tell("\nwhat to type", style="bold")
    for command in found.commands:
        tell(f"  {command}")


def rows(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield a name and words for each thing that was found."""
    gpus, system = machine.gpus, machine.system
    yield "exl2flow", machine.exl2flow
    yield "Python", system.python
    wsl = ", in WSL" if system.is_wsl else ""
    yield "platform", f"{system.platform}, {system.processors} processors{wsl}"
    yield "NVIDIA driver", _driver(gpus.driver)
    yield "torch", _torch(gpus.torch)
    yield "CuPy", _cupy(gpus.cupy)
    for index, card in enumerate(gpus.cards):
        yield f"GPU {index}", _card(card)
    yield "memory", _memory(machine.memory)
    for disk in machine.disks:
        free = words.UNKNOWN if disk.free is None else f"{words.size(disk.free)} free"
        yield disk.use, _joined(f"{free} for `{disk.folder}`", disk.problem)
    url = machine.server.url or "PREFECT_API_URL is not set: runs start a temporary one"
    yield (
        "Prefect server",
        url if machine.server.problem is None else _joined(url, machine.server.problem),
    )
    for extra in machine.extras:
        found = (f"{name} {known or 'missing'}" for name, known in extra.versions.items())
        yield extra.name, ", ".join(found)


def _joined(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _driver(driver: Driver) -> str:
    if driver.version is None and driver.cuda is None:
        return driver.problem or "none found"
    newest = driver.cuda and f"supports CUDA up to {driver.cuda}"
    return _joined(driver.version or "unknown version", newest, driver.problem)


def _torch(build: TorchBuild) -> str:
    if not build.works:
        return _joined(build.version, build.problem)
    built = f"built for CUDA {build.cuda}" if build.cuda else "built without CUDA"
    return _joined(build.version, built, f"sees {build.gpus} GPUs", build.problem)


def _cupy(build: CupyBuild) -> str:
    if not build.packages:
        return "not installed"
    compiler = build.nvrtc and f"NVRTC {build.nvrtc}"
    ran = "a kernel compiles and runs" if build.runs else "a kernel compiles"
    return _joined(*build.packages, compiler, build.problem or ran)


def _card(card: Gpu) -> str:
    return _joined(
        card.name,
        None if card.total is None else words.size(card.total),
        None if card.free is None else f"{words.size(card.free)} free",
        card.capability and f"compute capability {card.capability}",
        None if card.copy_rate is None else f"copies at {card.copy_rate:,.0f} GB/s",
        card.problem,
    )


def _server(server: PrefectServer) -> str:
    if server.url is None:
        return server.problem or "PREFECT_API_URL is not set, so runs start a temporary one"
    return _joined(server.url, server.problem or "it answers")


def _memory(memory: HostMemory) -> str:
    if memory.total is None or memory.available is None:
        return memory.problem or words.UNKNOWN
    limit = memory.pinned_limit
    pinned = "without a limit" if limit is None else f"at most {words.size(limit)}"
    return (
        f"{words.size(memory.available)} of {words.size(memory.total)} available, "
        f"pinned {pinned} (ulimit -l)"
    )
