"""What a machine can do, what it cannot, and what to type: conclusions of `exl2flow doctor`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from exl2flow.cli.output.extras import requirements
from exl2flow.cli.work.gpus import Gpus
from exl2flow.cli.work.machine import Disk, Extra, HostMemory, PrefectServer, System
from exl2flow.core.installing import install, reinstall, replace
from exl2flow.core.options.environment import LEAST_ARCHITECTURE

RUN = "run models: generate, chat, serve, bench, inspect"
CONVERT = "convert, sweep, measure, refine, validate, report, publish"
PREFECT = "Prefect: runs in its UI, server, webhook"
ON_GPU = "use the GPU"
OLDEST_CUDA = 12  # that CuPy 14 has packages for
TORCH_PAGE = "https://pytorch.org/get-started/locally/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that the probes found."""

    exl2flow: str
    system: System
    memory: HostMemory
    disks: tuple[Disk, ...]
    gpus: Gpus
    server: PrefectServer
    extras: tuple[Extra, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that does not work.

    what: it is; why: the cause; command: what to type, None: nothing helps or the cause says it;
    is_fault: it should work, because what it needs is there.
    """

    what: str
    why: str
    command: str | None = None
    is_fault: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What works, and what does not."""

    works: tuple[str, ...]
    fails: tuple[Failure, ...]

    @property
    def is_healthy(self) -> bool:
        """Nothing fails that should work."""
        return not any(failure.is_fault for failure in self.fails)

    @property
    def commands(self) -> tuple[str, ...]:
        """What to type, without repetitions."""
        given = (failure.command for failure in self.fails)
        return tuple(dict.fromkeys(command for command in given if command is not None))


def findings(machine: Machine) -> Findings:
    """Return what the probes mean for a user."""
    works, fails = list[str](), list[Failure]()
    base, *extras = machine.extras
    for what, failure in (
        (f"{RUN}, on the CPU", _base_failure(base, machine.gpus)),
        (f"{ON_GPU}: {names(machine.gpus)}", gpu_failure(machine.gpus)),
        *((_task_of(extra), _extra_failure(extra)) for extra in extras),
    ):
        if failure is None:
            works.append(what)
        else:
            fails.append(failure)
    return Findings(works=tuple(works), fails=(*fails, *_surroundings(machine)))


def to_json(machine: Machine) -> dict[str, object]:
    """Return what was found and what it means, as one object."""
    found = findings(machine)
    fails = [asdict(failure) for failure in found.fails]
    conclusions = {"works": found.works, "fails": fails, "commands": found.commands}
    return {**asdict(machine), **conclusions, "healthy": found.is_healthy}


def names(gpus: Gpus) -> str:
    """Return the names of the GPUs, each once."""
    return ", ".join(dict.fromkeys(card.name for card in gpus.cards))


def _base_failure(base: Extra, gpus: Gpus) -> Failure | None:
    if base.missing:
        why = f"missing or of another version: {', '.join(base.missing)}"
        return Failure(what=RUN, why=why, command=install(base.missing), is_fault=True)
    if gpus.torch.problem is not None and not gpus.torch.works:
        why = f"torch cannot be imported: {gpus.torch.problem}"
        return Failure(what=RUN, why=why, command=reinstall(_torch()), is_fault=True)
    return None


def _torch() -> str:
    return next(line for line in requirements("") if line.startswith("torch"))


def _task_of(extra: Extra) -> str:
    return {"convert": CONVERT, "prefect": PREFECT}[extra.name]


def _extra_failure(extra: Extra) -> Failure | None:
    if not extra.missing:
        return None
    return Failure(
        what=_task_of(extra),
        why=f"the extra `{extra.name}` is missing or incomplete: {', '.join(extra.missing)}",
        command=install(extra.missing),
    )


def gpu_failure(gpus: Gpus) -> Failure | None:
    """Return why no GPU is used, or why one of them cannot be; None: all can.

    What has to be mended first comes first: the driver, torch, CuPy, a card.
    """
    driver, torch, is_fault = gpus.driver, gpus.torch, True
    command = None
    if not gpus.cards:
        told = driver.problem or (torch.problem if torch.works else None)
        why, is_fault = told or "no NVIDIA GPU, or no driver for it", told is not None
    elif not torch.works:
        why = "torch cannot be imported"
    elif 0 < _major(driver.cuda) < OLDEST_CUDA:
        why = f"the driver supports CUDA {driver.cuda}, CuPy needs 12; install a newer driver"
    elif not torch.gpus:
        why, command = _blind(gpus)
        is_fault = not gpus.is_hidden
    elif not gpus.cupy.packages:
        why, command = "CuPy is missing, which compiles the kernels", install(_cupy(gpus))
    elif gpus.cupy.problem is not None:
        why, command = f"CuPy does not work: {gpus.cupy.problem}", _mended_cupy(gpus)
    elif (told := _card_problem(gpus)) is not None:
        why = told
    else:
        return None
    return Failure(what=ON_GPU, why=why, command=command, is_fault=is_fault)


def _major(version: str | None) -> int:
    """Return the first number of a version, 0 if it is unknown."""
    return int((version or "0").partition(".")[0])


def _blind(gpus: Gpus) -> tuple[str, str | None]:
    """Return why torch sees no GPU, and what to type."""
    torch, supported = gpus.torch, gpus.driver.cuda
    if gpus.is_hidden:
        return f"CUDA_VISIBLE_DEVICES is `{gpus.hidden_by}`", "unset CUDA_VISIBLE_DEVICES"
    if torch.cuda is None:
        why = f"torch {torch.version} is built without CUDA"
    elif _major(torch.cuda) > _major(supported) > 0:
        why = f"torch is built for CUDA {torch.cuda}, the driver supports {supported}"
    else:
        return torch.problem or "torch sees no GPU, and does not say why", None
    if _is_default(gpus):
        return why, reinstall(_torch())
    return f"{why}; {TORCH_PAGE} has the command for CUDA {OLDEST_CUDA}", None


def _is_default(gpus: Gpus) -> bool:
    """Return whether the driver runs what the registry's plain packages are built for."""
    return _major(gpus.driver.cuda) != OLDEST_CUDA


def _cupy(gpus: Gpus) -> list[str]:
    """Return the requirements of the CUDA extra that the driver supports; torch's if unknown."""
    supported = _major(gpus.driver.cuda) or _major(gpus.torch.cuda)
    return requirements(f"cuda{12 if supported == OLDEST_CUDA else 13}")


def _mended_cupy(gpus: Gpus) -> str:
    """Return what to type where CuPy is installed and does not work."""
    (wanted,) = _cupy(gpus)
    found = [package.partition(" ")[0] for package in gpus.cupy.packages]
    if len(found) > 1 or not wanted.startswith(found[0] + ">"):
        return replace(found, wanted)
    if gpus.cupy.nvrtc is None or gpus.cupy.runs is None:
        is_12 = "12" in found[0]
        return install(["nvidia-cuda-nvrtc-cu12>=12.4" if is_12 else "nvidia-cuda-nvrtc>=13"])
    return reinstall(wanted)


def _card_problem(gpus: Gpus) -> str | None:
    for card in gpus.cards:
        if card.problem is not None:
            return f"{card.name}: {card.problem}"
        if card.capability is not None and _architecture(card.capability) < LEAST_ARCHITECTURE:
            return (
                f"{card.name} has compute capability {card.capability}, the kernels need "
                f"{LEAST_ARCHITECTURE / 10}"
            )
    return None


def _architecture(capability: str) -> int:
    major, _, minor = capability.partition(".")
    return 10 * int(major) + int(minor or 0)


def _surroundings(machine: Machine) -> Iterator[Failure]:
    """Yield what fails beside the libraries."""
    for disk in machine.disks:
        if disk.problem is not None:
            yield Failure(what=f"{disk.use} `{disk.folder}`", why=disk.problem, is_fault=True)
    if machine.server.problem is not None:
        yield Failure(
            what=f"Prefect's server `{machine.server.url}`",
            why=f"{machine.server.problem}; start it, or unset PREFECT_API_URL for a temporary one",
            command="unset PREFECT_API_URL",
            is_fault=True,
        )
