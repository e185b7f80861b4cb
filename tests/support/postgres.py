"""A PostgreSQL cluster in a temporary folder, from what Debian's package `postgresql` installs."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import free_port

USER, PASSWORD = "exl2flow", "not a secret"


def programs() -> Path | None:
    """Return the folder of `initdb` and `pg_ctl`, installing them if that can be done."""
    if not _installed() and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "postgresql"]
        subprocess.run(install, check=False, stdout=subprocess.DEVNULL)
    return _installed()


def _installed() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return found[-1] if found else None


@contextmanager
def cluster(programs: Path) -> Iterator[str]:
    """Run a new cluster and yield the URL of a database in it."""
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    folder = Path(tempfile.mkdtemp(prefix="exl2flow-postgres-"))
    try:
        secret = folder / "password"
        secret.write_text(PASSWORD)
        if as_user:
            shutil.chown(folder, "postgres")
            shutil.chown(secret, "postgres")
        port = free_port()
        data = str(folder / "data")
        make = ["-D", data, "-U", USER, "-A", "scram-sha-256", "--pwfile", str(secret), "-N"]
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        start = ["-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start"]
        quiet = {"stdout": subprocess.DEVNULL, "cwd": folder, "check": True}
        subprocess.run([*as_user, str(programs / "initdb"), *make], **quiet)
        subprocess.run([*as_user, str(programs / "pg_ctl"), *start], **quiet)
        try:
            yield (
                f"postgresql+asyncpg://{USER}:{PASSWORD.replace(' ', '%20')}"
                f"@127.0.0.1:{port}/postgres"
            )
        finally:
            stop = ["-D", data, "-m", "immediate", "stop"]
            subprocess.run([*as_user, str(programs / "pg_ctl"), *stop], **quiet)
    finally:
        shutil.rmtree(folder)
