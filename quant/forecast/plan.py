"""What a conversion will do and need, told before it starts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from exl2flow.core import words
from exl2flow.quant.forecast.gpu import Card, GpuNeed
from exl2flow.quant.forecast.main_memory import Need

BASE_MEMORY = 700 * 2**20  # interpreter, torch, Prefect


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a conversion will do and need, before it starts; sizes in bytes."""

    model: str
    architecture: str
    layers: int
    weights: int
    device: str
    calibration: str
    target: str
    reachable_bpw: tuple[float, float]
    output_bytes: int
    work_bytes: int
    memory_bytes: int
    needs: Mapping[str, Need]
    card: Card | None
    gpu_needs: Mapping[str, GpuNeed]
    work_dir: str
    out: str

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "needs": {name: need.to_json() for name, need in self.needs.items()},
            "card": self.card and asdict(self.card),
            "gpu_needs": {name: need.to_json() for name, need in self.gpu_needs.items()},
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, value) for people."""
        low, high = self.reachable_bpw
        return [
            ("model", f"{self.model} ({self.architecture}, {self.layers} layers)"),
            ("weights", f"{self.weights / 1e6:.1f} M"),
            ("device", self.device),
            ("calibration", self.calibration),
            ("target", f"{self.target} (decoder's reachable bpw: {low:.2f} to {high:.2f})"),
            ("output", f"{self.out}, about {megabytes(self.output_bytes)}"),
            ("checkpoints", f"{self.work_dir}, up to {megabytes(self.work_bytes)}"),
            ("memory", f"about {megabytes(self.memory_bytes)}"),
            ("by stage", _by_stage(self.needs)),
            *(_of_card(self.card, self.gpu_needs) if self.card else []),
        ]


def _of_card(card: Card, needs: Mapping[str, GpuNeed]) -> list[tuple[str, str]]:
    """Return what stages need of a GPU, for people."""
    memory = [
        f"{name} {need.memory / 1e9:.1f}{'' if need.states_stay else ' (states in main memory)'}"
        for name, need in needs.items()
        if need.memory
    ]
    times = [f"{name} {need.seconds:.0f}" for name, need in needs.items() if need.seconds >= 1]
    minutes = sum(need.seconds for need in needs.values()) / 60
    return [
        ("GPU memory", f"{', '.join(memory)} of {card.memory / 1e9:.1f} GB of the {card.name}"),
        ("GPU time", f"about {minutes:.1f} min before validation: {', '.join(times)} s"),
    ]


def _by_stage(needs: Mapping[str, Need]) -> str:
    """Return the memory of each stage in short, all in one unit."""
    sizes = [
        f"{name} {(BASE_MEMORY + need.memory) / 1e9:.2f}"
        for name, need in needs.items()
        if name != "tokenize"  # too little to tell
    ]
    return f"{', '.join(sizes)} GB"


def megabytes(size: int) -> str:
    """Return a size in words."""
    return words.size(size)
