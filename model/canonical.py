"""The tensors of a model by the names of EXL2 files, whatever its own files call them.

A family's row says which beginnings of names differ, and which stored linears hold the rows of
several projections. Those become entries of their own: reading one reads only its bytes.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from exl2flow.core.errors import SourceModelError, TensorShapeError
from exl2flow.model.spec import ModelSpec
from exl2flow.model.weights import TensorFiles

PARTS = (".weight", ".bias")  # of a linear, both with a row per out-feature


class CanonicalTensors(TensorFiles):
    """The tensors of a model's folder by canonical name."""

    def __init__(self, spec: ModelSpec) -> None:
        """Read the headers.

        Raises:
            SourceModelError: as for `TensorFiles`, or two tensors have one canonical name.
            TensorShapeError: a fused tensor has other rows than its projections.
        """
        super().__init__(spec.source_dir)
        stored, self._entries = self._entries, {}
        fused = dict(pair for part in PARTS for pair in _fused(spec, part))
        for old, entry in stored.items():
            name = _renamed(spec, old)
            rows = fused.get(name)
            if rows is None:
                parts = [(name, entry)]
            elif entry.shape[:1] == (sum(rows.values()),):
                firsts = accumulate(rows.values(), initial=0)
                places = zip(rows.items(), firsts, strict=False)
                parts = [(part, entry.rows(first, count)) for (part, count), first in places]
            else:
                raise TensorShapeError(
                    f"`{old}` has shape {entry.shape}, the config implies {sum(rows.values())} "
                    "rows; get the model's files again, complete"
                )
            for part, located in parts:
                if part in self._entries:
                    raise SourceModelError(
                        f"`{old}` in `{self.folder}` is `{part}`, which another tensor is too; "
                        "remove the file that does not belong to the model"
                    )
                self._entries[part] = located


def _renamed(spec: ModelSpec, name: str) -> str:
    """Return the canonical name of a stored tensor, fused ones still whole."""
    for old, new in spec.family.renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _fused(spec: ModelSpec, part: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield each fused tensor that there may be, and the rows of its parts in order."""
    if not spec.family.fused:
        return
    rows = {p.key: p.out_features for s in spec.sublayers for p in s.projections}
    for layer in range(spec.num_layers):
        start = f"{spec.layers_key}{layer}."
        for name, parts in spec.family.fused:
            yield f"{start}{name}{part}", {f"{start}{p}{part}": rows[start + p] for p in parts}
