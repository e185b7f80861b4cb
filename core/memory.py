"""How much memory there is."""

from pathlib import Path


def available_memory() -> int | None:
    """Return the kernel's estimate of memory that can be used, or None where it gives none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
