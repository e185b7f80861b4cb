"""What `exl2flow doctor` finds out about a machine beside its GPUs.

Every probe answers whatever the machine is like: `tried` turns what it raises into words.
"""

import http.client
import os
import platform
import resource
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from exl2flow.cli.output.extras import requirements
from exl2flow.core.words import cause

BASE = "base"  # what every installation has
EXTRAS = (BASE, "convert", "prefect")
SERVER_SECONDS = 1.0  # in which Prefect's server answers
API_VARIABLE = "PREFECT_API_URL"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The interpreter and the operating system."""

    python: str = ""
    platform: str = ""
    is_wsl: bool = False
    processors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of main memory; pinned_limit: that a process may lock, None: any number."""

    total: int | None = None
    available: int | None = None
    pinned_limit: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Free bytes of the disk on which a folder is, or will be."""

    use: str = ""
    folder: str = ""
    free: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectServer:
    """The server of PREFECT_API_URL; url: without a password, None: none is set."""

    url: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """The libraries of an extra; versions: None is not installed.

    missing: requirements that are not met, by a library that is not installed or of another
    version.
    """

    name: str
    versions: dict[str, str | None]
    missing: tuple[str, ...]


def tried(probe: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return what a probe finds; if it fails, what stands for that, given the cause in words."""
    try:
        return probe()
    except Exception as error:  # a broken installation raises anything
        return otherwise(in_words(error))


def in_words(error: BaseException) -> str:
    """Return the first line of what an error says, or its class if it says nothing."""
    return cause(error).strip().partition("\n")[0] or type(error).__name__


def probe_system() -> System:
    """Return the interpreter and the operating system."""
    return System(
        python=platform.python_version(),
        platform=platform.platform(),
        is_wsl="microsoft" in platform.release().lower(),
        processors=len(os.sched_getaffinity(0)),
    )


def probe_memory() -> HostMemory:
    """Return main memory, and how much of it a process may lock (`ulimit -l`)."""
    found = psutil.virtual_memory()
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = None if limit == resource.RLIM_INFINITY else limit
    return HostMemory(total=found.total, available=found.available, pinned_limit=pinned)


def hub_folder() -> Path:
    """Return the folder in which Hugging Face's libraries keep what they fetch."""
    if given := os.environ.get("HF_HOME"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface"


def probe_disk(use: str, folder: Path) -> Disk:
    """Return the disk of a folder, which need not exist yet."""
    path = Path(os.path.abspath(folder))
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    problem = None
    if not os.access(there, os.W_OK | os.X_OK):
        problem = f"`{there}` cannot be written to"
    return Disk(use=use, folder=str(path), free=shutil.disk_usage(there).free, problem=problem)


def probe_server() -> PrefectServer:
    """Ask the server of PREFECT_API_URL how it is, if one is set."""
    given = os.environ.get(API_VARIABLE)
    if not given:
        return PrefectServer()
    url = without_password(given)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=SERVER_SECONDS) as answer:
            healthy = answer.read(16).strip() == b"true"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        told = in_words(reason) if isinstance(reason, BaseException) else str(reason)
        return PrefectServer(url=url, problem=f"it does not answer: {told}")
    ill = None if healthy else "what answers is not a Prefect server that is well"
    return PrefectServer(url=url, problem=ill)


def without_password(url: str) -> str:
    """Return an address without the user and the password that may be in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def probe_extra(name: str) -> Extra:
    """Return which libraries of an extra are installed, in which versions."""
    wanted = [Requirement(line) for line in requirements("" if name == BASE else name)]
    versions = {each.name: version_of(each.name) for each in wanted}
    missing = tuple(str(each) for each in wanted if not _is_met(each, versions[each.name]))
    return Extra(name=name, versions=versions, missing=missing)


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _is_met(wanted: Requirement, found: str | None) -> bool:
    return found is not None and wanted.specifier.contains(found, prereleases=True)


def memory_of(pid: int) -> int:
    """Return the main memory of a process in bytes; 0 once it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
