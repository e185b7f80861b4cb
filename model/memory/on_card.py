"""A model's plan beside a GPU's memory: whether it fits, and how long a text could be."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from exl2flow.core.errors import ConfigError
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model.config.mtp import MtpSpec
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.memory.footprint import Footprint, pages
from exl2flow.model.memory.plan import MemoryPlan

USUAL_CONTEXT = 8192  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """A plan for the wanted context, and the bytes of a GPU.

    most_tokens: the longest context that fits, in whole pages, at most the model's positions; 0:
    not even a page.
    """

    memory: int
    plan: MemoryPlan
    most_tokens: int

    @property
    def fits(self) -> bool:
        """Whether the GPU has room for the model with the wanted context."""
        return self.plan.total <= self.memory

    @classmethod
    def of(
        cls, plan: MemoryPlan, needs: Callable[[int], Footprint], *, memory: int, positions: int
    ) -> "OnCard":
        """Return a plan beside a GPU's memory.

        Args:
            plan: of the model, for the wanted context.
            needs: of the model, by context; see `needs_of`.
            memory: bytes of the GPU.
            positions: of the model.
        """

        def total(count: int) -> int:
            return needs(min(count * PAGE_TOKENS, positions)).total

        counts = range(1, pages(positions) + 1)
        fitting = bisect_right(counts, memory - plan.weights + plan.host, key=total)
        most = min(fitting * PAGE_TOKENS, positions)
        return cls(memory=memory, plan=plan, most_tokens=most)


def needs_of(
    spec: ModelSpec, *, cache_format: str, block: MtpSpec | None
) -> Callable[[int], Footprint]:
    """Return what gives a model's needs by context, each computed once; `block` drafts tokens."""

    @cache
    def needs(context: int) -> Footprint:
        return Footprint.of(spec, context=context, cache_format=cache_format, block=block)

    return needs


def context_of(spec: ModelSpec, wanted: int | None) -> int:
    """Return the tokens whose cache must fit; None: the usual number.

    Raises:
        ConfigError: the model has fewer positions.
    """
    context = wanted or min(USUAL_CONTEXT, spec.max_positions)
    if context > spec.max_positions:
        raise ConfigError(
            f"`--context {context}` exceeds the model's {spec.max_positions} positions"
        )
    return context
