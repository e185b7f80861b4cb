"""Sampling settings: scalars only; state that depends on history lives with its sequence."""

from dataclasses import dataclass
from typing import Self

from exl2flow.core.errors import ConfigError

GREEDY_BELOW = 0.01  # lower temperatures always take the likeliest token


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Neutral values disable a step: top_k 0, top_p 0 or 1, min_p 0."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.8
    min_p: float = 0.0
    cfg_scale: float | None = None

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 <= self.top_p <= 1, "between 0 and 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
        }
        for name, (holds, rule) in checks.items():
            if not holds:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; it must be {rule}")

    @classmethod
    def greedy(cls) -> Self:
        """Return settings that always take the likeliest token."""
        return cls(temperature=1.0, top_k=1, top_p=0.0)
