"""Facts of a card and of a launch, which decide how fast products of few rows run."""

from dataclasses import dataclass

BULK = 90  # compute capability from which kernels fetch codes by bulk copies


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Facts of a GPU.

    capability: that of the kernels, such as 90; processors: multiprocessors; shared: bytes of
    shared memory that a CTA can have.
    """

    capability: int
    processors: int
    shared: int

    @property
    def copies(self) -> str:
        """The way kernels fetch codes."""
        return "bulk copies" if self.capability >= BULK else "cp.async"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts of a launch.

    kernel: the instance; products: fused linears in it; slots: steps that a warp has in flight;
    ctas, shared: the number of CTAs, and bytes of shared memory of each; fill: work of the average
    multiprocessor over that of the busiest.
    """

    kernel: str
    products: int
    slots: int
    ctas: int
    shared: int
    fill: float
