"""What a model takes of a GPU's memory, whether that fits, and how long a text could be."""

from bisect import bisect_right
from dataclasses import dataclass

from exl2flow.core.errors import ConfigError
from exl2flow.kernels import PAGE_TOKENS
from exl2flow.model.config.mtp import MtpSpec
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.memory.footprint import Footprint, pages

USUAL_CONTEXT = 8192  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCard:
    """A model beside a GPU's memory; all sizes in bytes.

    weights: of the model's files; host: of these, what stays in host memory; needs: all else, for
    the wanted context; most_tokens: the longest context that fits, in whole pages, at most the
    model's positions; 0: not even a page.
    """

    memory: int
    weights: int
    host: int
    needs: Footprint
    most_tokens: int

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return self.weights - self.host + self.needs.total

    @property
    def fits(self) -> bool:
        """Whether the GPU has room for the model with the wanted context."""
        return self.total <= self.memory

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        memory: int,
        weights: int,
        host: int,
        context: int,
        cache_format: str,
        block: MtpSpec | None,
    ) -> "OnCard":
        """Return what a model with so many bytes of weights takes; `block` drafts tokens."""

        def needs(tokens: int) -> Footprint:
            return Footprint.of(spec, context=tokens, cache_format=cache_format, block=block)

        def with_pages(count: int) -> int:
            return needs(min(count * PAGE_TOKENS, spec.max_positions)).total

        counts = range(1, pages(spec.max_positions) + 1)
        fitting = bisect_right(counts, memory - weights + host, key=with_pages)
        return cls(
            memory=memory,
            weights=weights,
            host=host,
            needs=needs(context),
            most_tokens=min(fitting * PAGE_TOKENS, spec.max_positions),
        )


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
