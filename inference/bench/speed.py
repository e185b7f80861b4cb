"""Results of `exl2flow bench`: times, memory, and their share of the card's copy rate."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from exl2flow.core.store.manifest import versions
from exl2flow.inference.bench.decode_plan import DecodePlan
from exl2flow.kernels import CardFacts

DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one piece of work.

    work: `prompt`, of `context` tokens, or `decode`, of a token behind as many, for each row.
    read_bytes: weights, keys and values that a decode step reads; None: unknown.
    """

    work: str
    rows: int
    context: int
    seconds: float
    read_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens read of a prompt, or decoded."""
        return self.rows * (self.context if self.work == "prompt" else 1) / self.seconds

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes that are read for each decoded token."""
        return None if self.read_bytes is None else self.read_bytes / self.rows

    def share_of_copy(self, copy_rate: float | None) -> float | None:
        """Return bytes read per second, as a share of the `copy_rate` in GB/s."""
        nbytes = self.bytes_per_token
        if nbytes is None or copy_rate is None:
            return None
        return nbytes * self.tokens_per_second / (1e9 * copy_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of tensors on a GPU: of the loaded model, of the largest cache, and at most."""

    weights: int
    cache: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The result for one model.

    file_bytes: of all tensors in its files; memory, copy_rate (GB/s): None on a CPU; cards, plans:
    of the GPUs, and of the decode steps in `timings`, none on a CPU; omitted: what was left out,
    and why.
    """

    model: str
    device: str
    versions: Mapping[str, str]
    load_seconds: float
    file_bytes: int
    cache: str
    timings: tuple[Timing, ...]
    memory: Memory | None = None
    copy_rate: float | None = None
    cards: tuple[CardFacts, ...] = ()
    plans: tuple[DecodePlan, ...] = ()
    omitted: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return everything, with the figures that follow from it."""
        timings = [
            asdict(timing)
            | {
                "tokens_per_second": timing.tokens_per_second,
                "share_of_copy": timing.share_of_copy(self.copy_rate),
            }
            for timing in self.timings
        ]
        return {**asdict(self), "timings": timings}


def device_name(device: torch.device) -> str:
    """Return the card and its memory, or the threads that compute on the CPU."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        return f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
    return f"CPU, {torch.get_num_threads()} threads"


def all_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of libraries, and of CUDA and its driver on a GPU."""
    installed = versions()
    if device.type == "cuda":
        text = DRIVER.read_text() if DRIVER.exists() else ""
        installed |= {"cuda": str(torch.version.cuda), "driver": driver_version(text)}
    return installed


def driver_version(text: str) -> str:
    """Return the driver's version from the text of `/proc/driver/nvidia/version`."""
    match = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else "unknown"
