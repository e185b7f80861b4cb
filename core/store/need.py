"""`Need`: memory and disk that a stage takes at most."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Upper bounds for one stage, in bytes.

    memory_bytes: main memory beyond the process itself; kept_bytes: disk that stays occupied;
    passing_bytes: disk that is freed when the stage ends; output_bytes: disk of `--out`;
    pinned_bytes: hidden states that wait in main memory because the GPU has no room for them;
    holds: the weights that must be in memory together, if they are many; `shards`: the whole model
    among several GPUs, so that no single one must have `gpu_memory_bytes`.
    """

    memory_bytes: int = 0
    kept_bytes: int = 0
    passing_bytes: int = 0
    output_bytes: int = 0
    gpu_memory_bytes: int = 0
    pinned_bytes: int = 0
    holds: Literal["", "sublayer", "model", "shards"] = ""
