"""Options of a machine rather than of a run: what environment variables say."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from exl2flow.core.errors import ConfigError

LEAST_ARCHITECTURE = 80  # sm_80, the oldest that the kernels support


def cache_folder() -> Path | None:
    """Return the folder for what is quick to make again; None if the user has no home.

    `EXL2FLOW_CACHE` is its path; by default it is in the user's cache folder.
    """
    if given := os.environ.get("EXL2FLOW_CACHE"):
        return Path(os.path.expanduser(given))
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"))
    return folder / "exl2flow" if folder.is_absolute() else None


def is_tuning() -> bool:
    """Return whether measurements on this machine decide how it works; see `tuning_file`."""
    return os.environ.get("EXL2FLOW_TUNING") != "off"


def tuning_file() -> Path | None:
    """Return the file that stores tuned kernel launches; None if tuning is off.

    `EXL2FLOW_TUNING` is its path or `off`; by default it is in the cache folder.
    """
    given = os.environ.get("EXL2FLOW_TUNING")
    if given:
        return Path(os.path.expanduser(given)) if is_tuning() else None
    folder = cache_folder()
    return folder / "tuning.json" if folder is not None else None


def with_path(folders: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that finds modules in these folders."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def survive_lost_ranks() -> None:
    """Let torch not end this process when another one that it meets through NCCL is lost.

    Nor shall it look every second into the file in which they met, which is gone by then: it would
    wait for it, and so would whoever leaves the others.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def notify_socket() -> str:
    """Return the socket of the service manager as systemd names it, empty if there is none."""
    return os.environ.get("NOTIFY_SOCKET", "")


def virtual_architecture() -> int | None:
    """Return the architecture to compile kernels for, such as 80; None: that of the GPU.

    `EXL2FLOW_VIRTUAL_ARCH` is its number. It lets a GPU run the code of older ones.

    Raises:
        ConfigError: it is not a number, or older than what the kernels support.
    """
    given = os.environ.get("EXL2FLOW_VIRTUAL_ARCH")
    if not given:
        return None
    if not re.fullmatch("[0-9]{2,3}", given) or int(given) < LEAST_ARCHITECTURE:
        raise ConfigError(
            f"`EXL2FLOW_VIRTUAL_ARCH` is `{given}`; set an architecture from "
            f"{LEAST_ARCHITECTURE} on, such as `80` for sm_80, or unset it"
        )
    return int(given)
