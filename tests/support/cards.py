"""GPUs that people own, by what plans read of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU."""

    processors: int  # multiprocessors
    shared: int  # bytes of shared memory that a CTA can have
    memory_gb: int

    @property
    def limits(self) -> tuple[int, int]:
        """What `limits` of `kernels.cuda.compiler` returns on such a card."""
        return self.processors, self.shared


CARDS = {
    "3060": Card(processors=28, shared=99 << 10, memory_gb=12),
    "3090": Card(processors=82, shared=99 << 10, memory_gb=24),
    "4090": Card(processors=128, shared=99 << 10, memory_gb=24),
    "5090": Card(processors=170, shared=99 << 10, memory_gb=32),
    "a100": Card(processors=108, shared=163 << 10, memory_gb=80),
    "h200": Card(processors=132, shared=227 << 10, memory_gb=141),
}
