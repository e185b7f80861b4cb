"""Measurements of very many slots: lists of candidates once, numbers in arrays.

A file of a sublayer is JSON; the whole measurement has its numbers in `measurement.safetensors`
(`model/files/measured.py`), as fp32.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.store.files import read_json, write_json
from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.files.exl2 import QuantParams, padded_columns
from exl2flow.model.files.measured import (
    ARRAYS,
    MeasuredArrays,
    OptionList,
    arrays_file,
    read_arrays,
    write_arrays,
)
from exl2flow.quant.measure.results import Candidate, Results, Slots

MOST_ENTRIES = 2000  # slots of a measurement that is written as exllamav2 does
Lists = dict[tuple[tuple[tuple[tuple[str, QuantParams], ...], int], ...], int]


def is_compact(slots: int) -> bool:
    """Return whether a measurement of that many slots, the head included, has arrays."""
    return slots > MOST_ENTRIES


def bits_by_shape(
    projections: Iterable[ProjectionSpec], options: Sequence[QuantParams]
) -> Iterator[list[int]]:
    """Yield the stored bits of all options for each projection, computed once per shape."""
    known: dict[tuple[int, int, bool], list[int]] = {}
    for p in projections:
        shape = (p.in_features, padded_columns(p.out_features), p.has_bias)
        if shape not in known:
            k, n, has_bias = shape
            known[shape] = [option.total_bits(k, n, has_bias=has_bias) for option in options]
        yield known[shape]


def write_results(path: Path, results: Slots, *, compact: bool) -> str:
    """Write the results of some slots, and return the file's sha256."""
    if not compact:
        entries = {slot: [r.to_json() for r in measured] for slot, measured in results.items()}
        return write_json(path, entries)
    lists: Lists = {}
    slots = {
        name: {
            "options": _index(lists, measured),
            "accuracy": measured.accuracy.tolist(),
            "nats": None if measured.nats is None else measured.nats.tolist(),
        }
        for name, measured in results.items()
    }
    options = [listed.to_json() for listed in _listed(lists)]
    return write_json(path, {"options": options, "slots": slots}, indent=None)


def read_numbers(path: Path, name: str) -> list[float]:
    """Return the accuracies or nats of all candidates in a file of `write_results`."""
    content = read_json(path)
    if "options" in content and "slots" in content:
        return [number for slot in content["slots"].values() for number in slot[name]]
    return [entry[name] for entries in content.values() for entry in entries]


def read_results(paths: Iterable[Path], spec: ModelSpec) -> dict[str, Results]:
    """Read compact files of `write_results`, in order."""
    projections = slot_projections(spec)
    results: dict[str, Results] = {}
    for path in paths:
        content = read_json(path)
        lists = tuple(map(OptionList.from_json, content["options"]))
        maker = _Maker(path, projections, lists)
        for name, slot in content["slots"].items():
            nats = None if slot["nats"] is None else np.array(slot["nats"])
            results[name] = maker.results(name, slot["options"], np.array(slot["accuracy"]), nats)
    return results


def experts_slot(spec: ModelSpec, layer: int) -> str:
    """Return exllamav2's name of all experts of a layer, whatever the family calls them."""
    return f"{spec.layers_key}{layer}.block_sparse_moe"


def slot_projections(spec: ModelSpec) -> dict[str, tuple[ProjectionSpec, ...]]:
    """Return every possible slot: name → projections it chooses for."""
    slots = {part.name: part.projections for s in spec.sublayers for part in s.parts}
    for s in spec.sublayers:
        if s.group is not None:
            layer = experts_slot(spec, s.layer_index)
            routed = [p for p in s.projections if p.is_routed]
            slots[layer] = (*slots.get(layer, ()), *routed)
    return slots | {p.key: (p,) for p in (*spec.projections, spec.head)}


def _index(lists: Lists, results: Results) -> int:
    """Return the index of a slot's list of candidates, the name of a single projection left out."""
    candidates = (
        tuple(("" if len(candidate) == 1 else name, params) for name, params in candidate.items())
        for candidate in results.candidates
    )
    return lists.setdefault(tuple(zip(candidates, results.bits.tolist(), strict=True)), len(lists))


def _listed(lists: Lists) -> tuple[OptionList, ...]:
    return tuple(
        OptionList(
            options=tuple(dict(candidate) for candidate, _ in listed),
            bits=tuple(bits for _, bits in listed),
        )
        for listed in lists
    )


def write_compact(path: Path, slots: Slots, content: Mapping[str, object]) -> dict[Path, str]:
    """Write a measurement as arrays and a JSON file; return path → sha256, arrays first.

    Args:
        path: the JSON file.
        slots: the results of all slots, the head included.
        content: further entries of the JSON file.
    """
    lists: Lists = {}
    index = {name: _index(lists, results) for name, results in slots.items()}
    width = max(map(len, lists))
    accuracy, nats = torch.zeros(len(slots), width), torch.zeros(len(slots), width)
    for row, results in enumerate(slots.values()):
        accuracy[row, : len(results)] = torch.from_numpy(results.accuracy)
        if results.nats is not None:
            nats[row, : len(results)] = torch.from_numpy(results.nats)
    has_nats = all(results.nats is not None for results in slots.values())
    measured = MeasuredArrays(
        slots=index,
        lists=_listed(lists),
        accuracy=accuracy,
        nats=nats if has_nats else None,
    )
    arrays = arrays_file(path)
    entry = write_arrays(arrays, measured)
    sha256 = str(entry["sha256"])
    return {arrays: sha256, path: write_json(path, {**content, ARRAYS: entry})}


def read_compact(path: Path, entry: Mapping[str, Any], spec: ModelSpec) -> dict[str, Results]:
    """Read the results of all slots of a measurement that has arrays.

    Args:
        path: the JSON file.
        entry: its entry `arrays`.
        spec: the model.

    Raises:
        ConfigError: see `read_arrays`; or a slot has other bits than in this model.
    """
    measured = read_arrays(path, entry)
    maker = _Maker(path, slot_projections(spec), measured.lists)
    accuracy = measured.accuracy.double().numpy()
    nats = None if measured.nats is None else measured.nats.double().numpy()
    results: dict[str, Results] = {}
    for row, (name, index) in enumerate(measured.slots.items()):
        if name in maker.projections:  # others are ignored, as where there are no arrays
            length = len(measured.lists[index].bits)
            costs = None if nats is None else nats[row, :length]
            results[name] = maker.results(name, index, accuracy[row, :length], costs)
    return results


class _Maker:
    """Makes results whose candidates and bits are shared by all slots that have the same."""

    def __init__(
        self,
        path: Path,
        projections: Mapping[str, tuple[ProjectionSpec, ...]],
        lists: tuple[OptionList, ...],
    ) -> None:
        self.path, self.projections, self.lists = path, projections, lists
        self._candidates: dict[tuple[object, ...], tuple[Candidate, ...]] = {}
        self._bits = [np.array(listed.bits, np.int64) for listed in lists]
        self._right: set[tuple[object, ...]] = set()  # lists with the bits of these shapes

    def results(
        self, name: str, index: int, accuracy: np.ndarray, nats: np.ndarray | None
    ) -> Results:
        """Return the results of a slot with a list of options.

        Raises:
            ConfigError: the options or their bits are not those of its projections.
        """
        candidates = self._listed(name, index)
        self._check_bits(name, index, candidates)
        return Results(candidates=candidates, bits=self._bits[index], accuracy=accuracy, nats=nats)

    def _listed(self, name: str, index: int) -> tuple[Candidate, ...]:
        names = tuple(p.name for p in self.projections[name])
        key = (index, *names)
        if key not in self._candidates:
            alone = names[0] if len(names) == 1 else ""
            made = tuple(
                {n or alone: params for n, params in option.items()}
                for option in self.lists[index].options
            )
            for candidate in made:
                if {*candidate} != {*names}:
                    raise ConfigError(f"`{self.path}`: `{name}` lists {sorted(candidate)}")
            self._candidates[key] = made
        return self._candidates[key]

    def _check_bits(self, name: str, index: int, candidates: Sequence[Candidate]) -> None:
        projections = self.projections[name]
        shapes = ((p.in_features, padded_columns(p.out_features), p.has_bias) for p in projections)
        key = (index, *shapes)
        if key in self._right:
            return
        of_each = (
            next(bits_by_shape([p], [candidate[p.name] for candidate in candidates]))
            for p in projections
        )
        for stated, bits in zip(self.lists[index].bits, zip(*of_each, strict=True), strict=True):
            if stated != sum(bits):
                raise ConfigError(
                    f"`{self.path}` states {stated} bits for `{name}`, this model has {sum(bits)}; "
                    "it is of another model"
                )
        self._right.add(key)
