"""The products of decode steps on a GPU: in few launches, with codes in flight, or not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from exl2flow.kernels import PlanFacts, get_ops
from exl2flow.model import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """The launches of a layer's products for a number of rows, those of the layer that is worst.

    launches: from an attention to the next one; 0: matrices are decoded, and torch multiplies.
    kernels: their instances; slots, ctas, fill: the lowest of any launch, shared: the most, see
    `PlanFacts`; None without launches.
    """

    rows: int
    launches: int = 0
    kernels: tuple[str, ...] = ()
    slots: int | None = None
    ctas: int | None = None
    shared: int | None = None
    fill: float | None = None

    @classmethod
    def of(cls, rows: int, layers: Iterable[Sequence[PlanFacts]]) -> Self:
        """Summarize the launches of each layer."""
        each = [*layers]
        found = [facts for layer in each for facts in layer]
        if not found:
            return cls(rows=rows)
        return cls(
            rows=rows,
            launches=max(map(len, each)),
            kernels=tuple(dict.fromkeys(facts.kernel for facts in found)),
            slots=min(facts.slots for facts in found),
            ctas=min(facts.ctas for facts in found),
            shared=max(facts.shared for facts in found),
            fill=min(facts.fill for facts in found),
        )


def decode_plans(decoder: Decoder, rows: Iterable[int]) -> tuple[DecodePlan, ...]:
    """Return a plan for each number of rows, in order; none unless all linears are packed.

    Plans are those of steps that ran before.
    """

    def plan(count: int) -> DecodePlan | None:
        layers = [(span.device, layer) for span in decoder.spans for layer in span.calls(count)]
        facts = (
            [facts for call in layer for facts in get_ops(device).launches(call, count)]
            for device, layer in layers
        )
        return DecodePlan.of(count, facts) if layers else None

    plans = map(plan, dict.fromkeys(rows))
    return tuple(plan for plan in plans if plan is not None)
