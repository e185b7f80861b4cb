"""The tensors of a model by the names of EXL2 files, whatever its own files call them.

A family's row says which beginnings of names differ, which stored linears hold the rows of several
projections, which hold those of all experts, and which are stored as their transposes. What is read
of a part are its own bytes, or at most its expert's.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch.nn import functional

from exl2flow.core.errors import SourceModelError, TensorShapeError
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.files.entry import TensorEntry
from exl2flow.model.files.packed_experts import packed_experts, unpacked
from exl2flow.model.files.weights import TensorFiles

PARTS = (".weight", ".bias")  # of a linear, both with a row per out-feature


class CanonicalTensors(TensorFiles):
    """The tensors of a model's folder by canonical name."""

    def __init__(self, spec: ModelSpec, *, start: str = "") -> None:
        """Read the headers, of tensors whose canonical names begin with `start`.

        Raises:
            SourceModelError: as for `TensorFiles`, or two tensors have one canonical name.
            TensorShapeError: a fused or packed tensor has another shape than its projections imply.
        """
        super().__init__(spec.source_dir)
        self._unit_rows = f"{spec.head.key}.weight" if spec.has_unit_head else ""
        stored, self._entries = self._entries, {}
        self._origins: dict[str, str] = {}
        fused = dict(pair for part in PARTS for pair in fused_rows(spec, part))
        packed = packed_experts(spec)
        turned = set[str]()  # weights of layers that are stored as (in, out), fused ones whole
        if spec.family.is_transposed:
            turned = {name for name in fused if name.endswith(PARTS[0])}
            turned |= {f"{projection.key}{PARTS[0]}" for projection in spec.projections}
        for old, entry in stored.items():
            name = _renamed(spec, old)
            if not name.startswith(start):
                continue
            if name in turned and name != old:
                entry = entry.transposed()
            parts = (
                unpacked(packed[name], old, entry)
                if name in packed
                else _parts(spec, old, entry, name, fused.get(name))
            )
            for part, located in parts:
                if part in self._entries:
                    raise SourceModelError(
                        f"`{old}` in `{self.folder}` is `{part}`, which another tensor is too; "
                        "remove the file that does not belong to the model"
                    )
                self._entries[part] = located
                self._origins[part] = f"`{old}` transposed" if name in turned else f"`{old}`"

    def origin(self, name: str) -> str:
        """Return the name of a tensor in backticks, and in brackets what it is made from."""
        stored = self._origins[name]
        return f"`{name}`" if stored == f"`{name}`" else f"`{name}` ({stored})"

    def _read(
        self, name: str, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> torch.Tensor:
        tensor = super()._read(name, device, pinned=pinned)
        return functional.normalize(tensor, dim=-1) if name == self._unit_rows else tensor


def _parts(
    spec: ModelSpec, old: str, entry: TensorEntry, name: str, rows: Mapping[str, int] | None
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the canonical tensors that a stored one holds."""
    if rows is None:
        yield name, entry
        return
    dims = 2 if name.endswith(PARTS[0]) else 1
    if entry.shape[:1] != (sum(rows.values()),) or len(entry.shape) != dims:
        side = "columns" if entry.is_transposed else "rows"
        raise TensorShapeError(
            f"`{old}` in `{entry.path}` has shape {entry.stored_shape}, the config implies "
            f"{sum(rows.values())} {side}; get the model's files again, complete"
        )
    groups = 1
    if spec.family.packed_heads:
        groups = min(rows.values()) // spec.attention(0).head_dim
    counts = [count // groups for count in rows.values()]
    for part, first, count in zip(rows, accumulate(counts, initial=0), counts, strict=False):
        located = entry.rows(first, count) if groups == 1 else entry.grouped(groups, first, count)
        yield part, located


def _renamed(spec: ModelSpec, name: str) -> str:
    """Return the canonical name of a stored tensor, fused ones still whole."""
    name = _replaced(name, spec.family.renames)
    if not spec.family.layer_renames:
        return name
    layer = re.match(rf"{re.escape(spec.layers_key)}\d+\.", name)
    if layer is None:
        return name
    return layer[0] + _replaced(name.removeprefix(layer[0]), spec.family.layer_renames)


def _replaced(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """Return a name with its beginning as the first pair that fits says."""
    for old, new in renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def fused_rows(spec: ModelSpec, part: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield each fused tensor that there may be, and the rows of its parts in order."""
    if not spec.family.fused:
        return
    rows = {p.key: p.out_features for p in spec.projections}
    for layer in range(spec.num_layers):
        start = f"{spec.layers_key}{layer}."
        for name, parts in spec.family.fused:
            if all(start + p in rows for p in parts):  # a layer may have experts instead
                yield f"{start}{name}{part}", {f"{start}{p}{part}": rows[start + p] for p in parts}
