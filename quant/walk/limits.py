"""Effect of `--max-memory` on results on a GPU; part of the options of stages that walk.

Sums are taken in another order when fewer rows pass a sublayer together, and when a matrix lies in
main memory. Both follow from shapes and the limit, so a limit that changes neither has no effect
on fingerprints.
"""

from collections import Counter

from exl2flow.core.options.config import RunOptions
from exl2flow.core.runtime.memory import usable
from exl2flow.model import ProjectionSpec, resolve
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.model.layers.stream import CALIBRATION_ROWS, rows_together
from exl2flow.quant.walk.pinned import is_tall
from exl2flow.quant.walk.source_model import most_rows, widest


def effect_of_limit(config: RunOptions, row_tokens: int) -> dict[str, object]:
    """Return what the limit of memory changes in a walk on a GPU; nothing without a limit.

    Args:
        config: the run.
        row_tokens: tokens per row of the walk.

    Returns:
        `rows_together`: widest feature → rows, if not as many as usual; `tall`: elements of the
        matrices in main memory, alone and side by side.
    """
    if config.max_memory is None:
        return {}
    limit, spec = usable(config.max_memory), resolve(config.source)
    parts = [sublayer.projections for sublayer in spec.sublayers]
    usual = {(widest(s.projections), most_rows(s)) for s in spec.sublayers}
    together = [(w, most, rows_together(w, row_tokens, limit, most=most)) for w, most in usual]
    fewer = {
        str(w) if most == CALIBRATION_ROWS else f"{w} of experts": rows
        for w, most, rows in sorted(together)
        if rows < most
    }
    sizes = {size for projections in (*parts, (spec.head,)) for size in _sizes(projections)}
    tall = sorted(size for size in sizes if is_tall(size, limit))
    return {"limit": {"rows_together": fewer, "tall": tall}} if fewer or tall else {}


def _sizes(projections: tuple[ProjectionSpec, ...]) -> set[int]:
    """Return the elements of matrices, and of the ones that are worked on side by side."""
    alike = Counter((p.capture, p.in_features, p.out_features) for p in projections)
    return {
        k * columns * count
        for (_, k, n), most in alike.items()
        for columns in (n, padded_columns(n))
        for count in range(1, most + 1)
    }
