"""What the work on one sublayer takes of a GPU beside states, from shapes alone.

A GPU keeps states if they fit beside this, else they wait in main memory.
"""

from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.exl2 import padded_columns

NARROW = 2  # bytes of a weight as the model computes with it, fp16
FLOAT = 4
ROUNDED = 10  # bytes per weight of what is rounded: values, codes, what they decode to
REFINED = 12  # per weight refined side by side: signed codes, gradient, codes, a window's change
PASSING = 1 << 29  # a row's activations, chunks of wide matrices, the libraries' own


def working_bytes(spec: ModelSpec) -> int:
    """Return what the largest sublayer, or the head, takes at least: all remedies applied."""
    parts = [sublayer.projections for sublayer in spec.sublayers]
    return PASSING + max(_working(projections) for projections in [*parts, (spec.head,)])


def _working(projections: tuple[ProjectionSpec, ...]) -> int:
    """Add up the worst moments of `measure` and of `quantize`."""
    sizes = {p.name: p.in_features * padded_columns(p.out_features) for p in projections}
    readers: dict[str, int] = {}  # capture → weights that read it
    widths = {p.capture: p.in_features for p in projections}
    for p in projections:
        readers[p.capture] = readers.get(p.capture, 0) + sizes[p.name]
    weights, hessians = sum(sizes.values()), FLOAT * sum(k * k for k in widths.values())
    largest = FLOAT * max(widths.values()) ** 2
    measuring = 3 * hessians + FLOAT * max(readers.values()) + ROUNDED * max(sizes.values())
    # both kinds of Hessians; targets; a factor in the making; one activation's matrices refined
    refining = (
        2 * hessians + FLOAT * weights + largest + max(largest, REFINED * max(readers.values()))
    )
    return NARROW * weights + max(measuring, refining)
