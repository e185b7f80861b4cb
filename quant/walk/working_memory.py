"""GPU memory that the work on one sublayer needs beside states, from shapes alone.

States stay on the GPU if they fit beside this, else they go to main memory.
"""

from collections import Counter
from collections.abc import Sequence

from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.quant.walk.pinned import is_tall

NARROW = 2  # bytes of a weight in the forward pass, fp16
FLOAT = 4
ROUNDED = 8  # bytes per weight while rounding: values, codes, decoded values
REFINED = 7  # per weight while refining: gradient, codes before and after, a window's change
TALL = 7  # per weight of a tall matrix: as in the file, codes, decoded values, packed
PASSING = 1 << 29  # a row's activations, chunks of wide matrices, the libraries' own
MOST_TOGETHER = 3 << 27  # weights of experts side by side; each copy of a matrix counts, and one
# expert's copies have to fit
TOGETHER = 11  # bytes per such weight: values, codes, decoded values; errors of some
COPIES = 18  # of a matrix side by side while measuring, at most
FACTORING = 12  # bytes per element of experts' Hessians: factors being computed, and side by side


def stored_elements(projection: ProjectionSpec) -> int:
    """Return the weights of a projection as stored, padding included."""
    return projection.in_features * padded_columns(projection.out_features)


def working_bytes(spec: ModelSpec, limit: int) -> int:
    """Return the least memory in bytes for the largest sublayer or the head, with all remedies.

    Args:
        spec: the model.
        limit: usable bytes of the GPU.
    """
    parts = [sublayer.projections for sublayer in spec.sublayers]
    return PASSING + max(_working(projections, limit) for projections in [*parts, (spec.head,)])


def _working(projections: tuple[ProjectionSpec, ...], limit: int) -> int:
    """Return the peak of `measure` and `quantize`."""
    sizes = {p.name: stored_elements(p) for p in projections}
    readers: dict[str, int] = {}  # capture → weights that read it
    widths = {p.capture: p.in_features for p in projections}
    for p in projections:
        readers[p.capture] = readers.get(p.capture, 0) + sizes[p.name]
    weights, hessians = sum(sizes.values()), FLOAT * sum(k * k for k in widths.values())
    if is_tall(max(sizes.values()), limit):
        return 2 * hessians + TALL * weights
    largest = FLOAT * max(widths.values()) ** 2
    measuring = 3 * hessians + FLOAT * max(readers.values()) + ROUNDED * max(sizes.values())
    # both kinds of Hessians; targets; a factor being computed; one activation's matrices refined
    refining = (
        2 * hessians + FLOAT * weights + largest + max(largest, REFINED * max(readers.values()))
    )
    measuring += together_bytes(projections, copies=COPIES)
    refining += together_bytes(projections, copies=1)
    return NARROW * weights + max(measuring, refining)


def together_bytes(projections: Sequence[ProjectionSpec], *, copies: int, runs: int = 1) -> int:
    """Return what a GPU needs in bytes to round a group's experts side by side; 0 without experts.

    Args:
        projections: of a sublayer.
        copies: of each matrix.
        runs: kinds of matrices that are rounded at a time.
    """
    weights: dict[str, int] = {}  # by capture of an expert
    widths = {p.capture: p.in_features for p in projections}
    for p in projections:
        if p.is_routed:
            weights[p.capture] = weights.get(p.capture, 0) + copies * stored_elements(p)
    alike = Counter((widths[capture], size) for capture, size in weights.items())
    found = [
        (width, size, count)
        for (width, size), count in alike.items()
        if count > 1 and size <= MOST_TOGETHER
    ]
    beside = min(MOST_TOGETHER, sum(size * count for _, size, count in found))
    squares = sum(width**2 * count for width, _, count in found)
    return runs * TOGETHER * beside + FACTORING * squares
