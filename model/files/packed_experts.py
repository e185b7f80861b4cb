"""Projections of all experts of a layer that are stored as one tensor, located expert by expert."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from exl2flow.core.errors import TensorShapeError
from exl2flow.model.config.experts_spec import implying_keys
from exl2flow.model.config.family import Packing
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.config.sublayer_spec import ProjectionSpec
from exl2flow.model.files.entry import TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The projections that a stored tensor holds, by expert, each in the order of the packing.

    keys: config keys that imply its shape, for messages.
    """

    packing: Packing
    experts: Sequence[Sequence[ProjectionSpec]]
    keys: str

    def shape(self, *, is_transposed: bool) -> tuple[int, ...]:
        """Return the shape that it must have."""
        rows = sum(projection.out_features for projection in self.experts[0])
        columns = self.experts[0][0].in_features
        matrix = (columns, rows) if is_transposed else (rows, columns)
        first, *others = (rows,) if self.packing.part == "bias" else matrix
        count = len(self.experts)
        return (count * first, *others) if self.packing.is_flat else (count, first, *others)

    def is_transposed(self, shape: tuple[int, ...]) -> bool | None:
        """Return whether matrices are (in, out) in a tensor of a shape; None: it cannot be it."""
        declared = self.packing.is_transposed
        ways = (declared, not declared) if self.packing.may_turn else (declared,)
        return next((way for way in ways if self.shape(is_transposed=way) == shape), None)


def packed_experts(spec: ModelSpec) -> Mapping[str, PackedExperts]:
    """Return what each packed tensor holds that there may be, by its name in the model."""
    row = spec.family.experts
    if row is None or not row.packings:
        return {}
    by_key = {projection.key: projection for projection in spec.projections}
    keys, found = implying_keys(row, spec.text_config), dict[str, PackedExperts]()
    for layer in range(spec.num_layers):
        count = spec.experts_of(layer)
        if not count:
            continue
        start = f"{spec.layers_key}{layer}"
        for packing in row.packings:
            experts = [
                [by_key[f"{start}.{row.experts}.{e}.{name}"] for name in packing.projections]
                for e in range(count)
            ]
            held = PackedExperts(packing=packing, experts=experts, keys=keys)
            found[f"{start}.{packing.name}"] = held
    return found


def unpacked(
    held: PackedExperts, stored: str, entry: TensorEntry
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield name and location of each projection's part.

    Args:
        held: what the tensor holds.
        stored: its name in the file, for messages.
        entry: of the whole tensor.

    Raises:
        TensorShapeError: it has another shape.
    """
    packing = held.packing
    is_transposed = held.is_transposed(entry.shape)
    if is_transposed is None:
        implied = held.shape(is_transposed=packing.is_transposed)
        raise TensorShapeError(
            f"`{stored}` in `{entry.path}` has shape {entry.shape}, {held.keys} in `config.json` "
            f"imply {implied}; get the model's files again, complete"
        )
    for index, projections in enumerate(held.experts):
        matrix = _of_expert(entry, index, len(held.experts), is_flat=packing.is_flat)
        if is_transposed and len(matrix.shape) > 1:
            matrix = matrix.transposed()
        counts = [projection.out_features for projection in projections]
        begins = accumulate(counts, initial=0)
        for place, (projection, begin) in enumerate(zip(projections, begins, strict=False)):
            name = f"{projection.key}.{packing.part}"
            if len(projections) == 1:
                yield name, matrix
            elif packing.is_interleaved:
                yield name, matrix.every(len(projections), place)
            else:
                yield name, matrix.rows(begin, projection.out_features)


def _of_expert(entry: TensorEntry, index: int, count: int, *, is_flat: bool) -> TensorEntry:
    if not is_flat:
        return entry.slice(index)
    rows = entry.shape[0] // count
    return entry.rows(index * rows, rows)
